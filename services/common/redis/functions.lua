#!lua name=orca_v1

-- All changes to Orca's keys. Every function is idempotent: clients retry after connection errors on their own.
-- KEYS[1] is orca:{partition}:requests; the other keys share its hash tag.

local INBOX_MAXLEN = 10000
local INBOX_TTL_S = 120
local CONTROL_MAXLEN = 1000
local CONTROL_TTL_S = 300
local RESIGNED_MS = 10000
local USAGE_TTL_S = 400 * 86400
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

-- A doorbell: look at this request's state; with a worker, move it there.
local function ring(prefix, request, worker)
  local control = prefix .. 'control'
  if worker then
    redis.call('XADD', control, 'MAXLEN', '~', CONTROL_MAXLEN, '*', 'r', request, 'w', worker)
  else
    redis.call('XADD', control, 'MAXLEN', '~', CONTROL_MAXLEN, '*', 'r', request)
  end
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

-- How many requests have ended, and how many were refused, in this span of five seconds and in the one before.
local SPAN_MS = 5000
local UNKNOWN_RATE_S = 5

local function count(prefix, what, number)
  local key, now = prefix .. 'rate', now_ms()
  local span = math.floor(now / SPAN_MS)
  local held = tonumber(redis.call('HGET', key, 'span') or '-2')
  if held ~= span then
    for _, name in ipairs({ 'ended', 'refused' }) do
      local last = held == span - 1 and redis.call('HGET', key, name) or 0
      redis.call('HSET', key, name .. ':before', last or 0, name, 0)
    end
    redis.call('HSET', key, 'span', span)
  end
  redis.call('HINCRBY', key, what, number)
  redis.call('EXPIRE', key, 60)
end

-- Seconds until those refused lately, this one among them, have had their turn, at the rate at which requests end.
local function retry_after(prefix)
  local values = redis.call('HMGET', prefix .. 'rate', 'ended', 'ended:before', 'refused', 'refused:before')
  local function sum(a, b) return tonumber(values[a] or 0) + tonumber(values[b] or 0) end
  local seconds = (SPAN_MS + math.fmod(now_ms(), SPAN_MS)) / 1000
  if sum(1, 2) == 0 then return UNKNOWN_RATE_S end
  return math.max(1, math.min(60, math.ceil(sum(3, 4) * seconds / sum(1, 2))))
end

-- What is in the system: requests and the tokens that they may come to hold, in total and per tenant.
local function add_load(prefix, tenant, requests, tokens)
  local key = prefix .. 'load'
  for _, field in ipairs({ 'requests', 'requests:' .. tenant }) do
    if redis.call('HINCRBY', key, field, requests) <= 0 then redis.call('HDEL', key, field) end
  end
  for _, field in ipairs({ 'tokens', 'tokens:' .. tenant }) do
    if redis.call('HINCRBY', key, field, tokens) <= 0 then redis.call('HDEL', key, field) end
  end
end

-- The first limit that one more request would break, or nil.
local function limit_broken(prefix, terms)
  local load = redis.call('HMGET', prefix .. 'load',
    'requests', 'tokens', 'requests:' .. terms.tenant, 'tokens:' .. terms.tenant)
  local more = { 1, terms.tokens, 1, terms.tokens }
  for i, limit in ipairs(terms.limits) do
    -- A request that is alone in the system may be larger than the limit on tokens: it could never come in otherwise.
    local held = tonumber(load[i] or '0')
    if limit > 0 and held > 0 and held + more[i] > limit then return i end
  end
end

-- Who has this idempotency key: 'joined' and the request, 'mismatch', or nil.
local function owner_of(prefix, terms)
  local held = redis.call('GET', prefix .. 'idempotency:' .. terms.key)
  if not held then return nil end
  local owner, body = string.match(held, '^(%S+) (%S+)$')
  local v = redis.call('HMGET', state_key(prefix, owner), 'choices', 'abort')
  if not v[1] or v[2] then return nil end
  if body ~= terms.body then return { 'mismatch' } end
  return { 'joined', owner }
end

-- ARGV: request, payload, document (what another router needs to go on with the stream), terms (JSON: router, choices,
-- prompt_tokens, tokens, tenant, limits (requests, tokens, and the same per tenant; 0 is none), window in s, resumable,
-- turned_away, key and body (digests; '' without an idempotency key)).
-- Returns {'ok'}, {'full', which limit, retry after s}, {'joined', request}, {'mismatch'} or {'gone'}.
local function enqueue(keys, args)
  local prefix = prefix_of(keys)
  local request, payload, document, terms = args[1], args[2], args[3], cjson.decode(args[4])
  local state = state_key(prefix, request)
  if redis.call('EXISTS', state) == 1 then
    return { redis.call('HEXISTS', state, 'choices') == 1 and 'ok' or 'gone' }
  end
  local owner = terms.key ~= '' and owner_of(prefix, terms)
  if owner then return owner end
  if terms.turned_away > 0 then count(prefix, 'refused', terms.turned_away) end
  local broken = limit_broken(prefix, terms)
  if broken then
    count(prefix, 'refused', 1)
    return { 'full', broken, retry_after(prefix) }
  end
  generation(prefix)
  local entry = redis.call('XADD', keys[1], '*', 'r', request, 'p', payload)
  redis.call('HSET', state, 'entry', entry, 'choices', terms.choices, 'prompt_tokens', terms.prompt_tokens,
    'epoch', 0, 'last', '0-0', 'window', terms.window, 'readers', terms.router, 'document', document,
    'tenant', terms.tenant, 'tokens', terms.tokens, 'key', terms.key, 'resumable', terms.resumable and 1 or 0)
  if terms.key ~= '' then
    redis.call('SET', prefix .. 'idempotency:' .. terms.key, request .. ' ' .. terms.body)
  end
  add_load(prefix, terms.tenant, 1, terms.tokens)
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
-- never what opted into resume ('detach' leaves any request so): that runs on for a grace period.
-- With 'unborn' a request that is not there can never be enqueued any more.
-- Returns {'ok'}, {'kept'}, {'finished'} or {'gone'}.
local function abort(keys, args)
  local prefix = prefix_of(keys)
  local state = state_key(prefix, args[1])
  local v = redis.call('HMGET', state, 'choices', 'done', 'readers', 'resumable')
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
  if args[2] ~= '' and (others ~= '' or v[4] == '1' or args[3] == 'detach') then return { 'kept' } end
  redis.call('HSET', state, 'abort', 1)
  ring(prefix, args[1])
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

redis.register_function('orca_v1_enqueue', enqueue)
redis.register_function('orca_v1_publish', publish)
redis.register_function('orca_v1_fence', fence)
redis.register_function('orca_v1_attach', attach)
redis.register_function('orca_v1_abort', abort)
redis.register_function('orca_v1_move', move)
redis.register_function('orca_v1_register', register)
redis.register_function('orca_v1_registered', registered)
redis.register_function('orca_v1_lead', lead)
