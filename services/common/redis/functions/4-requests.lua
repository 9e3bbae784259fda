-- A crash of the worker that ran the request: how often it has crashed alone without a token in between. Kept with the
-- journal's length, so that progress clears it.
local function suspicion(state, total, crash)
  local held, length = string.match(redis.call('HGET', state, 'suspect') or '', '^(%d+):(%d+)$')
  local stands = held and tonumber(length) == total
  if crash == '' then return stands and held or '' end
  local alone = (stands and tonumber(held) or 0) + (crash == 'alone' and 1 or 0)
  redis.call('HSET', state, 'suspect', alone .. ':' .. total)
  return tostring(alone)
end

-- ARGV: request, epoch, choices (comma-separated), crash ('', 'shared' or 'alone'). A higher epoch takes all choices
-- (attempt 1); within an epoch the attempts of the named choices are raised.
-- Returns {'ok', aborted, crashes alone ('' if it is no suspect), then per choice: attempt, ids, finish}, {'stale'} or
-- {'gone'}.
local function fence(keys, args)
  local prefix = prefix_of(keys)
  local request, epoch = args[1], tonumber(args[2])
  local state = state_key(prefix, request)
  local values = redis.call('HMGET', state, 'epoch', 'abort', 'choices', 'done')
  if not values[1] or values[4] then return { 'gone' } end
  local held, choices = tonumber(values[1]), tonumber(values[3])
  if epoch < held then return { 'stale' } end
  if epoch > held then
    redis.call('HSET', state, 'epoch', args[2])
    for c = 0, choices - 1 do redis.call('HSET', state, 'attempt:' .. c, 1) end
  else
    for _, c in ipairs(split_ids(args[3])) do redis.call('HINCRBY', state, 'attempt:' .. c, 1) end
  end
  local ids, finish = {}, {}
  for c = 0, choices - 1 do ids[c], finish[c] = {}, '' end
  each_item(journal_key(prefix, request), function(c, _, item_ids, item_finish)
    if item_ids ~= '' then table.insert(ids[c], item_ids) end
    if item_finish ~= '' then finish[c] = item_finish end
  end)
  local out = { 'ok', values[2] and '1' or '', suspicion(state, completion_tokens(state, choices), args[4]) }
  for c = 0, choices - 1 do
    out[#out + 1] = redis.call('HGET', state, 'attempt:' .. c)
    out[#out + 1] = table.concat(ids[c], ',')
    out[#out + 1] = finish[c]
  end
  return out
end

-- The readers without one of them: the others' names, by space.
local function without(readers, router)
  local others = {}
  for name in string.gmatch(readers or '', '%S+') do
    if name ~= router then others[#others + 1] = name end
  end
  return table.concat(others, ' ')
end

-- ARGV: request, router. Joins the readers; the caller then reads the journal and drops duplicates.
-- Returns {'ok', document, last entry if it is over} or {'gone'}.
local function attach(keys, args)
  local state = state_key(prefix_of(keys), args[1])
  local v = redis.call('HMGET', state, 'choices', 'readers', 'document', 'done', 'last')
  if not v[1] then return { 'gone' } end
  local others = without(v[2], args[2])
  redis.call('HSET', state, 'readers', others == '' and args[2] or others .. ' ' .. args[2])
  return { 'ok', v[3], v[4] and v[5] or '' }
end

-- ARGV: request, router ('' aborts whoever reads), how. A router's leaving aborts only when it was the last reader, and
-- never what opted into resume ('detach' leaves any request so): that runs on for a grace period; nor what outlives its
-- readers: that runs to its end.
-- With 'unborn' a request that is not there can never be enqueued any more.
-- Returns {'ok'}, {'kept'}, {'finished'} or {'gone'}.
local function abort(keys, args)
  local prefix = prefix_of(keys)
  local state = state_key(prefix, args[1])
  local v = redis.call('HMGET', state, 'choices', 'done', 'readers', 'resumable', 'outlives')
  if not v[1] then
    if args[3] == 'unborn' then
      redis.call('HSET', state, 'unborn', 1)
      redis.call('EXPIRE', state, 120)
    end
    return { 'gone' }
  end
  local others = without(v[3], args[2])
  if args[2] ~= '' then redis.call('HSET', state, 'readers', others) end
  if v[2] then return { 'finished' } end
  local stays = others ~= '' or v[4] == '1' or v[5] == '1' or args[3] == 'detach'
  if args[2] ~= '' and stays then return { 'kept' } end
  redis.call('HSET', state, 'abort', 1)
  ring(prefix, args[1])
  return { 'ok' }
end

-- ARGV: request. Takes away what is left of one that is over, before its window ends; its idempotency key names nothing
-- then. Returns {'ok'}, {'running'} or {'gone'}.
local function forget(keys, args)
  local prefix = prefix_of(keys)
  local state = state_key(prefix, args[1])
  local v = redis.call('HMGET', state, 'choices', 'done')
  if not v[1] then return { 'gone' } end
  if not v[2] then return { 'running' } end
  redis.call('DEL', state, journal_key(prefix, args[1]))
  return { 'ok' }
end

-- ARGV: request, worker ('' is any other). A doorbell for the leader. Returns {'ok'} or {'gone'}.
local function move(keys, args)
  local prefix = prefix_of(keys)
  local v = redis.call('HMGET', state_key(prefix, args[1]), 'choices', 'done')
  if not v[1] or v[2] then return { 'gone' } end
  ring(prefix, args[1], args[2])
  return { 'ok' }
end

redis.register_function('orca_v1_fence', fence)
redis.register_function('orca_v1_attach', attach)
redis.register_function('orca_v1_abort', abort)
redis.register_function('orca_v1_forget', forget)
redis.register_function('orca_v1_move', move)
