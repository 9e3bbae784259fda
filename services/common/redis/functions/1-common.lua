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
