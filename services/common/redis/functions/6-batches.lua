-- Files and batches. A file's bytes lie in chunks beside its entry in the files of its tenant. A batch is worked on by one
-- router at a time: who claims it raises its fence, and what an earlier owner still says is refused.

local function file_key(prefix, file) return prefix .. 'file:' .. file end
local function batch_key(prefix, batch) return prefix .. 'batch:' .. batch end
local function results_key(prefix, batch) return prefix .. 'results:' .. batch end

-- How many files a tenant has, and their bytes, this one apart; those past their time are forgotten.
local function files_of(key, file, now)
  local all, number, bytes, latest = redis.call('HGETALL', key), 0, 0, 0
  for i = 1, #all, 2 do
    local kept = cjson.decode(all[i + 1])
    if kept.expires_at <= now then
      redis.call('HDEL', key, all[i])
    elseif all[i] ~= file then
      number, bytes, latest = number + 1, bytes + kept.size, math.max(latest, kept.expires_at)
    end
  end
  return number, bytes, latest
end

-- ARGV: tenant, file, document (JSON), most files, most bytes of the tenant (0 is no limit), batch and fence of the owner
-- that writes it ('' for an upload). Its chunks are there already, and live from now on as long as it does.
-- Returns {'ok'}, {'files'} or {'bytes'} (which limit it would break), or {'stale'}.
local function file_put(keys, args)
  local prefix = prefix_of(keys)
  local key, document, now = prefix .. 'files:' .. args[1], cjson.decode(args[3]), math.floor(now_ms() / 1000)
  if args[6] ~= '' and redis.call('HGET', batch_key(prefix, args[6]), 'fence') ~= args[7] then return { 'stale' } end
  local number, bytes, latest = files_of(key, args[2], now)
  if tonumber(args[4]) > 0 and number + 1 > tonumber(args[4]) then return { 'files' } end
  if tonumber(args[5]) > 0 and bytes + document.size > tonumber(args[5]) then return { 'bytes' } end
  redis.call('HSET', key, args[2], args[3])
  redis.call('EXPIREAT', key, string.format('%d', math.max(latest, document.expires_at)))
  redis.call('EXPIREAT', file_key(prefix, args[2]), string.format('%d', document.expires_at))
  return { 'ok' }
end

-- ARGV: tenant, batch, document (JSON), created at (s), most batches of the tenant, input file, seconds it is kept after
-- its end, s since the epoch until which the input is needed.
-- Returns {'ok'} or {'full'}.
local function batch_create(keys, args)
  local prefix = prefix_of(keys)
  local batch, all = batch_key(prefix, args[2]), prefix .. 'batches:' .. args[1]
  if redis.call('EXISTS', batch) == 1 then return { 'ok' } end
  for _, other in ipairs(redis.call('ZRANGE', all, 0, -1)) do
    if redis.call('EXISTS', batch_key(prefix, other)) == 0 then redis.call('ZREM', all, other) end
  end
  if redis.call('ZCARD', all) >= tonumber(args[5]) then return { 'full' } end
  redis.call('HSET', batch, 'document', args[3], 'tenant', args[1], 'status', 'validating', 'fence', 0)
  redis.call('ZADD', all, args[4], args[2])
  redis.call('EXPIREAT', all, string.format('%d', args[8] + 2 * args[7]))
  redis.call('ZADD', prefix .. 'work', 0, args[2])
  redis.call('EXPIREAT', file_key(prefix, args[6]), args[8], 'GT')
  return { 'ok' }
end

-- ARGV: owner, its lease in ms. The batch whose last owner has been silent for longest, or the oldest without one.
-- A retry whose answer was lost claims another: the first is taken over when its lease has lapsed.
-- Returns {batch, fence}, or {} when there is nothing to do.
local function batch_claim(keys, args)
  local prefix, now = prefix_of(keys), now_ms()
  local work = prefix .. 'work'
  for _, batch in ipairs(redis.call('ZRANGEBYSCORE', work, '-inf', now)) do
    local key = batch_key(prefix, batch)
    if redis.call('EXISTS', key) == 1 then
      redis.call('ZADD', work, now + tonumber(args[2]), batch)
      redis.call('HSET', key, 'owner', args[1])
      return { batch, tostring(redis.call('HINCRBY', key, 'fence', 1)) }
    end
    redis.call('ZREM', work, batch)
  end
  return {}
end

-- ARGV: batch, fence, lease in ms; 0 gives it back, for another to go on at once.
-- Returns {'ok', status, bytes of its results} or {'stale'}.
local function batch_renew(keys, args)
  local prefix, ttl = prefix_of(keys), tonumber(args[3])
  local v = redis.call('HMGET', batch_key(prefix, args[1]), 'fence', 'status', 'bytes')
  if v[1] ~= args[2] then return { 'stale' } end
  redis.call('ZADD', prefix .. 'work', 'XX', ttl > 0 and now_ms() + ttl or 0, args[1])
  return { 'ok', v[2], v[3] or '0' }
end

-- ARGV: batch, fence, line, what it counts as (completed or failed), the result. The first one of a line stays.
-- Returns {'ok'} or {'stale'}, also when no more results are taken.
local function batch_result(keys, args)
  local prefix = prefix_of(keys)
  local key = batch_key(prefix, args[1])
  local v = redis.call('HMGET', key, 'fence', 'closed')
  if v[1] ~= args[2] or v[2] then return { 'stale' } end
  if redis.call('HSETNX', results_key(prefix, args[1]), args[3], args[5]) == 1 then
    redis.call('HINCRBY', key, args[4], 1)
    redis.call('HINCRBY', key, 'bytes', string.len(args[5]))
  end
  return { 'ok' }
end

-- ARGV: batch, fence, status that it has, status that it gets, seconds it is kept ('' while it is not over), then fields
-- and values. The field closed ends the taking of results.
-- Returns {'ok'}, {'stale'} or, when it has another status, {'other', status}.
local function batch_move(keys, args)
  local prefix = prefix_of(keys)
  local key = batch_key(prefix, args[1])
  local v = redis.call('HMGET', key, 'fence', 'status')
  if v[1] ~= args[2] then return { 'stale' } end
  if v[2] ~= args[3] then return { v[2] == args[4] and 'ok' or 'other', v[2] } end
  redis.call('HSET', key, 'status', args[4], unpack(args, 6))
  if args[5] ~= '' then
    redis.call('ZREM', prefix .. 'work', args[1])
    redis.call('DEL', results_key(prefix, args[1]))
    redis.call('EXPIRE', key, args[5])
  end
  return { 'ok' }
end

-- ARGV: tenant, batch, now (s). Its owner sees it. Returns {'ok'}, {'over', status} or {'gone'}.
local function batch_cancel(keys, args)
  local key = batch_key(prefix_of(keys), args[2])
  local v = redis.call('HMGET', key, 'tenant', 'status')
  if v[1] ~= args[1] then return { 'gone' } end
  if v[2] == 'cancelling' then return { 'ok' } end
  if v[2] ~= 'validating' and v[2] ~= 'in_progress' then return { 'over', v[2] } end
  redis.call('HSET', key, 'status', 'cancelling', 'cancelling_at', args[3])
  return { 'ok' }
end

redis.register_function('orca_v1_file_put', file_put)
redis.register_function('orca_v1_batch_create', batch_create)
redis.register_function('orca_v1_batch_claim', batch_claim)
redis.register_function('orca_v1_batch_renew', batch_renew)
redis.register_function('orca_v1_batch_result', batch_result)
redis.register_function('orca_v1_batch_move', batch_move)
redis.register_function('orca_v1_batch_cancel', batch_cancel)
