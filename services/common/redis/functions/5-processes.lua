-- Registration and heartbeats. ARGV: kind (workers or routers), name, document, time to live in ms (0 removes).
local function register(keys, args)
  local key = prefix_of(keys) .. args[1]
  local ttl = tonumber(args[4])
  if ttl == 0 then
    redis.call('HDEL', key, args[2])
    if args[1] == 'routers' then redis.call('DEL', prefix_of(keys) .. 'inbox:' .. args[2]) end
  else
    redis.call('HSET', key, args[2], (now_ms() + ttl) .. ' ' .. args[3])
    redis.call('PEXPIRE', key, math.max(60000, ttl * 10))
  end
  return { 'ok' }
end

-- ARGV: kind. Returns name, document, ... of those alive; forgets the others.
local function registered(keys, args)
  local key = prefix_of(keys) .. args[1]
  local now, out = now_ms(), {}
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local expires, document = string.match(all[i + 1], '^(%d+) (.*)$')
    if tonumber(expires) > now then
      out[#out + 1] = all[i]
      out[#out + 1] = document
    else
      redis.call('HDEL', key, all[i])
    end
  end
  return out
end

-- ARGV: leader, time to live in ms (0 resigns), epoch that the caller leads with (0: none), claim.
-- A newly acquired lead raises the epoch; one that only lapsed while Redis was away does not. A lead that lapsed, and was
-- not given up, is taken only with the claim 'vacant', so that whoever had it while Redis was away comes first. With the
-- claim 'elected' it is taken from anybody: others than Redis have decided who leads.
-- Returns {'leader', epoch, generation}, {'vacant'} or {'standby', holder}.
local function lead(keys, args)
  local prefix = prefix_of(keys)
  local key, ttl = prefix .. 'leader', tonumber(args[2])
  local holder = redis.call('GET', key)
  if ttl == 0 then
    if holder == args[1] then redis.call('SET', key, '', 'PX', RESIGNED_MS) end
    return { 'standby', '' }
  end
  local elected = args[4] == 'elected'
  if holder and holder ~= '' and holder ~= args[1] and not elected then return { 'standby', holder } end
  local epoch = redis.call('GET', prefix .. 'epoch') or '0'
  local keeps = args[3] ~= '0' and args[3] == epoch
  if not holder and not keeps and args[4] == '' then return { 'vacant' } end
  if holder ~= args[1] and not keeps then
    -- An emptied Redis must not start again at an epoch that workers have seen: the clock is its floor.
    epoch = string.format('%d', math.max(tonumber(epoch) + 1, tonumber(redis.call('TIME')[1])))
    redis.call('SET', prefix .. 'epoch', epoch)
  end
  redis.call('SET', key, args[1], 'PX', ttl)
  return { 'leader', epoch, generation(prefix) }
end

redis.register_function('orca_v1_register', register)
redis.register_function('orca_v1_registered', registered)
redis.register_function('orca_v1_lead', lead)
