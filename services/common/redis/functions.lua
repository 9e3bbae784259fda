#!lua name=orca_v1

-- All changes to Orca's keys. Every function is idempotent: clients retry after connection errors on their own.
-- KEYS[1] is orca:{partition}:requests; the other keys share its hash tag.

local INBOX_MAXLEN = 10000
local INBOX_TTL_S = 120
local CONTROL_MAXLEN = 1000
local CONTROL_TTL_S = 300
-- choice:index:token ids:finish
local ITEM = '^(%d+):(%d+):([%d,]*):(%a*)$'

local function prefix_of(keys)
  return string.sub(keys[1], 1, -1 - string.len('requests'))
end

local function state_key(prefix, request) return prefix .. 'state:' .. request end
local function journal_key(prefix, request) return prefix .. 'journal:' .. request end

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function split_ids(ids)
  local out = {}
  for id in string.gmatch(ids, '%d+') do out[#out + 1] = id end
  return out
end

-- Calls f(choice, index, ids, finish) for each item of each journal entry, in order.
local function each_item(journal, f)
  for _, entry in ipairs(redis.call('XRANGE', journal, '-', '+')) do
    local fields = entry[2]
    for i = 1, #fields, 2 do
      local choice, index, ids, finish = string.match(fields[i], ITEM)
      if choice then f(tonumber(choice), tonumber(index), ids, finish) end
    end
  end
end

local function ring(prefix, request)
  local control = prefix .. 'control'
  redis.call('XADD', control, 'MAXLEN', '~', CONTROL_MAXLEN, '*', 'r', request)
  redis.call('EXPIRE', control, CONTROL_TTL_S)
end

local function generation(prefix)
  local key = prefix .. 'generation'
  local id = redis.call('GET', key)
  if not id then
    local t = redis.call('TIME')
    id = t[1] .. '-' .. t[2]
    redis.call('SET', key, id)
  end
  return id
end

-- ARGV: request, payload, router, choices, prompt tokens, most requests in the system, resume window in s
-- Returns {'ok'} or {'full', length}.
local function enqueue(keys, args)
  local prefix = prefix_of(keys)
  local request, payload, router, choices, prompt_tokens = args[1], args[2], args[3], args[4], args[5]
  local state = state_key(prefix, request)
  if redis.call('EXISTS', state) == 1 then return { 'ok' } end
  local length = redis.call('XLEN', keys[1])
  if length >= tonumber(args[6]) then return { 'full', length } end
  generation(prefix)
  local entry = redis.call('XADD', keys[1], '*', 'r', request, 'p', payload)
  redis.call('HSET', state, 'entry', entry, 'choices', choices, 'prompt_tokens', prompt_tokens,
    'epoch', 0, 'last', '0-0', 'window', args[7], 'reader:' .. router, 1)
  return { 'ok' }
end

-- What the journal's tail holds of one choice, read backwards only as far as asked for, once per call of publish.
local function tail_of(cache, journal, choice)
  local key = journal .. ':' .. choice
  if not cache[key] then
    cache[key] = { journal = journal, choice = choice, ids = {}, finish = '', lowest = math.huge, before = '+' }
  end
  return cache[key]
end

local function read_back_to(tail, index)
  while tail.before and tail.lowest > index do
    local entries = redis.call('XREVRANGE', tail.journal, tail.before, '-', 'COUNT', 64)
    tail.before = nil
    for _, entry in ipairs(entries) do
      tail.before = '(' .. entry[1]
      for i = 1, #entry[2], 2 do
        local choice, start, ids, finish = string.match(entry[2][i], ITEM)
        if choice == tail.choice then
          for offset, id in ipairs(split_ids(ids)) do tail.ids[tonumber(start) + offset - 1] = id end
          if finish ~= '' then tail.finish = finish end
          tail.lowest = math.min(tail.lowest, tonumber(start))
        end
      end
    end
  end
end

-- Is this item already in the journal? 'same', 'differs', or nil when part of it is not there.
local function compare(tail, item, ids)
  read_back_to(tail, item.index)
  for offset, id in ipairs(ids) do
    local there = tail.ids[item.index + offset - 1]
    if there == nil then return nil end
    if there ~= id then return 'differs' end
  end
  if item.finish ~= '' and item.finish ~= tail.finish then return nil end
  return 'same'
end

local function answer(prefix, touched, cache, item, worker)
  local state = state_key(prefix, item.request)
  local values = redis.call('HMGET', state, 'epoch', 'attempt:' .. item.choice, 'next:' .. item.choice, 'fin:' .. item.choice)
  if not values[1] then return 'gone' end
  if values[1] ~= item.epoch or values[2] ~= item.attempt then
    return 'stale'
  end
  local next_index = tonumber(values[3] or '0')
  local ids = split_ids(item.ids)
  if values[4] or (item.index < next_index and #ids > 0) then
    local known = compare(tail_of(cache, journal_key(prefix, item.request), item.choice), item, ids)
    if known == 'same' then return 'same' end
    if values[4] then return 'finished' end
    return known or ('gap:' .. next_index)
  end
  if item.index > next_index then return 'gap:' .. next_index end
  redis.call('HSET', state, 'next:' .. item.choice, next_index + #ids)
  if item.finish ~= '' then
    redis.call('HSET', state, 'fin:' .. item.choice, item.finish)
    redis.call('HINCRBY', state, 'finished', 1)
  end
  local key = item.request .. '\0' .. item.step
  local entry = touched[key]
  if not entry then
    entry = { request = item.request, fields = { '@', worker .. ':' .. item.step } }
    touched[key] = entry
    touched[#touched + 1] = entry
  end
  local header = item.choice .. ':' .. next_index .. ':' .. item.ids .. ':' .. item.finish
  entry.fields[#entry.fields + 1] = header
  entry.fields[#entry.fields + 1] = item.payload
  return 'ok'
end

-- The last choice has finished: usage into the journal, the request out of the queue, all keys expiring.
local function usage_of(state)
  local all = redis.call('HGETALL', state)
  local completion, values = 0, {}
  for i = 1, #all, 2 do
    values[all[i]] = all[i + 1]
    if string.sub(all[i], 1, 5) == 'next:' then completion = completion + tonumber(all[i + 1]) end
  end
  return values, values.prompt_tokens .. ':' .. completion
end

local function write_entry(prefix, keys, entry, is_last)
  local state, journal = state_key(prefix, entry.request), journal_key(prefix, entry.request)
  local values, usage = usage_of(state)
  local done = is_last and values.finished == values.choices and not values.done
  if done then
    entry.fields[#entry.fields + 1] = '$'
    entry.fields[#entry.fields + 1] = usage
  end
  local id = redis.call('XADD', journal, '*', unpack(entry.fields))
  redis.call('HSET', state, 'last', id)
  for name in pairs(values) do
    if string.sub(name, 1, 7) == 'reader:' then
      local inbox = prefix .. 'inbox:' .. string.sub(name, 8)
      redis.call('XADD', inbox, 'MAXLEN', '~', INBOX_MAXLEN, '*',
        'r', entry.request, 'j', id, 'b', values.last, unpack(entry.fields))
      redis.call('EXPIRE', inbox, INBOX_TTL_S)
    end
  end
  if done then
    redis.call('HSET', state, 'done', 1)
    redis.call('XDEL', keys[1], values.entry)
    redis.call('EXPIRE', state, values.window)
    redis.call('EXPIRE', journal, values.window)
  end
end

-- ARGV: worker, then per item: request, epoch, attempt, choice, index, ids (comma-separated), finish, payload, step
-- Returns one answer per item: ok, same, differs, gap:<next>, stale, finished, gone.
local function publish(keys, args)
  local prefix = prefix_of(keys)
  local answers, touched, cache = {}, {}, {}
  for i = 2, #args, 9 do
    local item = {
      request = args[i], epoch = args[i + 1], attempt = args[i + 2], choice = args[i + 3],
      index = tonumber(args[i + 4]), ids = args[i + 5], finish = args[i + 6], payload = args[i + 7], step = args[i + 8],
    }
    answers[#answers + 1] = answer(prefix, touched, cache, item, args[1])
  end
  local last = {}
  for position, entry in ipairs(touched) do last[entry.request] = position end
  for position, entry in ipairs(touched) do
    write_entry(prefix, keys, entry, last[entry.request] == position)
  end
  return answers
end

-- ARGV: request, epoch, choices (comma-separated). A higher epoch takes all choices (attempt 1); within an
-- epoch the attempts of the named choices are raised.
-- Returns {'ok', aborted, attempt, ids and finish per choice ...}, {'stale'} or {'gone'}.
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
  local out = { 'ok', values[2] and '1' or '' }
  for c = 0, choices - 1 do
    out[#out + 1] = redis.call('HGET', state, 'attempt:' .. c)
    out[#out + 1] = table.concat(ids[c], ',')
    out[#out + 1] = finish[c]
  end
  return out
end

-- ARGV: request, router. Joins the readers; the caller then reads the journal and drops duplicates.
-- Returns {'ok'} or {'gone'}.
local function attach(keys, args)
  local state = state_key(prefix_of(keys), args[1])
  if redis.call('EXISTS', state) == 0 then return { 'gone' } end
  redis.call('HSET', state, 'reader:' .. args[2], 1)
  return { 'ok' }
end

-- ARGV: request, router ('' aborts whoever reads). A router's leaving aborts only when it was the last reader.
-- Returns {'ok'}, {'kept'}, {'finished'} or {'gone'}.
local function abort(keys, args)
  local prefix = prefix_of(keys)
  local state = state_key(prefix, args[1])
  local values = redis.call('HMGET', state, 'epoch', 'done')
  if not values[1] then return { 'gone' } end
  if args[2] ~= '' then
    redis.call('HDEL', state, 'reader:' .. args[2])
    if values[2] then return { 'finished' } end
    for _, name in ipairs(redis.call('HKEYS', state)) do
      if string.sub(name, 1, 7) == 'reader:' then return { 'kept' } end
    end
  end
  if values[2] then return { 'finished' } end
  redis.call('HSET', state, 'abort', 1)
  ring(prefix, args[1])
  return { 'ok' }
end

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

-- ARGV: leader, time to live in ms (0 resigns), epoch that the caller leads with (0: none).
-- A newly acquired lead raises the epoch; one that only lapsed while Redis was away does not.
-- Returns {'leader', epoch, generation} or {'standby', holder}.
local function lead(keys, args)
  local prefix = prefix_of(keys)
  local key, ttl = prefix .. 'leader', tonumber(args[2])
  local holder = redis.call('GET', key)
  if ttl == 0 then
    if holder == args[1] then redis.call('DEL', key) end
    return { 'standby', '' }
  end
  if holder and holder ~= args[1] then return { 'standby', holder } end
  local epoch = redis.call('GET', prefix .. 'epoch') or '0'
  if not holder and (args[3] == '0' or args[3] ~= epoch) then
    -- An emptied Redis must not start again at an epoch that workers have seen: the clock is its floor.
    epoch = string.format('%d', math.max(tonumber(epoch) + 1, tonumber(redis.call('TIME')[1])))
    redis.call('SET', prefix .. 'epoch', epoch)
  end
  redis.call('SET', key, args[1], 'PX', ttl)
  return { 'leader', epoch, generation(prefix) }
end

redis.register_function('orca_v1_enqueue', enqueue)
redis.register_function('orca_v1_publish', publish)
redis.register_function('orca_v1_fence', fence)
redis.register_function('orca_v1_attach', attach)
redis.register_function('orca_v1_abort', abort)
redis.register_function('orca_v1_register', register)
redis.register_function('orca_v1_registered', registered)
redis.register_function('orca_v1_lead', lead)
