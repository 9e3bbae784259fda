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

-- What a call of publish knows of a request: read once, changed as its items are taken, written with its entries.
local function known_of(prefix, held, request, choice)
  local known, state = held[request], state_key(prefix, request)
  if not known then
    local v = redis.call('HMGET', state, 'attempt:' .. choice, 'next:' .. choice, 'fin:' .. choice,
      'epoch', 'finished', 'choices', 'done', 'last', 'readers')
    held[request] = {
      state = state, epoch = v[4], finished = tonumber(v[5] or '0'), choices = tonumber(v[6] or '0'), done = v[7],
      last = v[8], readers = v[9] or '',
      attempt = { [choice] = v[1] }, next = { [choice] = tonumber(v[2] or '0') }, fin = { [choice] = v[3] },
    }
    return held[request]
  end
  if not known.next[choice] then
    local v = redis.call('HMGET', state, 'attempt:' .. choice, 'next:' .. choice, 'fin:' .. choice)
    known.attempt[choice], known.next[choice], known.fin[choice] = v[1], tonumber(v[2] or '0'), v[3]
  end
  return known
end

local function append(list, name, value)
  list[#list + 1] = name
  list[#list + 1] = value
end

local function answer(prefix, touched, held, cache, item, worker)
  local c, known = item.choice, known_of(prefix, held, item.request, item.choice)
  if not known.epoch then return 'gone' end
  if known.epoch ~= item.epoch or known.attempt[c] ~= item.attempt then
    return 'stale'
  end
  local next_index, ids = known.next[c], split_ids(item.ids)
  if known.fin[c] or (item.index < next_index and #ids > 0) then
    local same = compare(tail_of(cache, journal_key(prefix, item.request), c), item, ids)
    if same == 'same' then return 'same' end
    if known.fin[c] then return 'finished' end
    return same or ('gap:' .. next_index)
  end
  if item.index > next_index then return 'gap:' .. next_index end
  local key = item.request .. '\0' .. item.step
  local entry = touched[key]
  if not entry then
    entry = { request = item.request, known = known, changes = {}, fields = { '@', worker .. ':' .. item.step } }
    touched[key] = entry
    touched[#touched + 1] = entry
  end
  known.next[c] = next_index + #ids
  append(entry.changes, 'next:' .. c, known.next[c])
  if item.finish ~= '' then
    known.fin[c], known.finished = item.finish, known.finished + 1
    append(entry.changes, 'fin:' .. c, item.finish)
    append(entry.changes, 'finished', known.finished)
  end
  append(entry.fields, c .. ':' .. next_index .. ':' .. item.ids .. ':' .. item.finish, item.payload)
  return 'ok'
end

local function completion_tokens(state, choices)
  local total = 0
  for c = 0, choices - 1 do total = total + tonumber(redis.call('HGET', state, 'next:' .. c) or '0') end
  return total
end

-- The last choice has finished: the request out of the queue, its use metered, all its keys expiring.
local function close(prefix, keys, request, completion)
  local state = state_key(prefix, request)
  local v = redis.call('HMGET', state, 'entry', 'window', 'tenant', 'tokens', 'key', 'prompt_tokens', 'choices')
  local tenant, usage = v[3], prefix .. 'usage'
  redis.call('HSET', state, 'done', 1)
  redis.call('XDEL', keys[1], v[1])
  redis.call('EXPIRE', state, v[2])
  redis.call('EXPIRE', journal_key(prefix, request), v[2])
  add_load(prefix, tenant, -1, -tonumber(v[4]))
  count(prefix, 'ended', 1)
  redis.call('HINCRBY', usage, 'requests:' .. tenant, 1)
  redis.call('HINCRBY', usage, 'prompt:' .. tenant, v[6])
  redis.call('HINCRBY', usage, 'completion:' .. tenant, completion)
  redis.call('EXPIRE', usage, USAGE_TTL_S)
  if v[5] == '' then return end
  local well = true
  for c = 0, tonumber(v[7]) - 1 do
    local finish = redis.call('HGET', state, 'fin:' .. c)
    well = well and (finish == 'stop' or finish == 'length')
  end
  -- What went wrong is not replayed: the next try under this key is a new one.
  local key = prefix .. 'idempotency:' .. v[5]
  if well then redis.call('EXPIRE', key, v[2]) else redis.call('DEL', key) end
end

-- inboxes: those written to are added.
local function write_entry(prefix, keys, entry, is_last, inboxes)
  local known, changes, journal = entry.known, entry.changes, journal_key(prefix, entry.request)
  local done, completion = is_last and known.finished == known.choices and not known.done, 0
  if done then
    redis.call('HSET', known.state, unpack(changes))
    changes = {}
    completion = completion_tokens(known.state, known.choices)
    entry.fields[#entry.fields + 1] = '$'
    entry.fields[#entry.fields + 1] = redis.call('HGET', known.state, 'prompt_tokens') .. ':' .. completion
  end
  local id = redis.call('XADD', journal, '*', unpack(entry.fields))
  redis.call('HSET', known.state, 'last', id, unpack(changes))
  for router in string.gmatch(known.readers, '%S+') do
    local inbox = prefix .. 'inbox:' .. router
    redis.call('XADD', inbox, 'MAXLEN', '~', INBOX_MAXLEN, '*',
      'r', entry.request, 'j', id, 'b', known.last, unpack(entry.fields))
    inboxes[inbox] = true
  end
  known.last = id
  if done then close(prefix, keys, entry.request, completion) end
end

-- epoch:attempt:choice:index:token ids:finish:step
local PUBLISHED = '^(%d+):(%d+):(%d+):(%d+):([%d,]*):(%a*):(%d+)$'

-- ARGV: worker, then per item: request, item (see PUBLISHED), payload
-- Returns one answer per item: ok, same, differs, gap:<next>, stale, finished, gone.
local function publish(keys, args)
  local prefix = prefix_of(keys)
  local answers, touched, held, cache = {}, {}, {}, {}
  for i = 2, #args, 3 do
    local epoch, attempt, choice, index, ids, finish, step = string.match(args[i + 1], PUBLISHED)
    local item = {
      request = args[i], epoch = epoch, attempt = attempt, choice = choice, index = tonumber(index), ids = ids,
      finish = finish, payload = args[i + 2], step = step,
    }
    answers[#answers + 1] = answer(prefix, touched, held, cache, item, args[1])
  end
  local last, inboxes = {}, {}
  for position, entry in ipairs(touched) do last[entry.request] = position end
  for position, entry in ipairs(touched) do
    write_entry(prefix, keys, entry, last[entry.request] == position, inboxes)
  end
  for inbox in pairs(inboxes) do redis.call('EXPIRE', inbox, INBOX_TTL_S) end
  return answers
end

redis.register_function('orca_v1_publish', publish)
