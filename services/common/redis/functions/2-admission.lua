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

-- A tenant's allowance of requests and of tokens a minute: each is a bucket that fills by its limit in a minute, up to it.
-- One request may take more tokens than a full bucket holds, and leaves it in debt. Returns what is left and the seconds
-- until each is full: {requests, seconds, tokens, seconds}, or nil and which limit is broken and the seconds until it is
-- not. Nothing is taken then. Limits of 0 are none.
local MINUTE_MS = 60000

local function take_rate(prefix, terms)
  local key, now = prefix .. 'bucket:' .. terms.tenant, now_ms()
  local held = redis.call('HMGET', key, 'at', 'requests', 'tokens')
  local passed = now - tonumber(held[1] or now)
  local left, reset = { 0, 0 }, { 0, 0 }
  for i, cost in ipairs({ 1, terms.tokens }) do
    local limit = terms.rates[i]
    if limit > 0 then
      local level = math.min(limit, tonumber(held[i + 1] or limit) + limit * passed / MINUTE_MS)
      local short = math.min(cost, limit) - level
      if short > 0 then return nil, i, math.ceil(short / limit * 60) end
      left[i] = level - cost
      reset[i] = math.ceil((limit - left[i]) / limit * 60)
    end
  end
  redis.call('HSET', key, 'at', now, 'requests', tostring(left[1]), 'tokens', tostring(left[2]))
  redis.call('EXPIRE', key, math.max(1, reset[1], reset[2]))
  return { math.max(0, math.floor(left[1])), reset[1], math.max(0, math.floor(left[2])), reset[2] }
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
-- prompt_tokens, tokens, tenant, limits (requests, tokens, and the same per tenant; 0 is none), rates (requests and tokens
-- a minute of the tenant; 0 is none), window in s, resumable, outlives, turned_away, key and body (digests; '' without
-- an idempotency key)).
-- Returns {'ok'}, with what is left of the rates if there are any; {'full', which limit, retry after s}, {'joined',
-- request}, {'mismatch'} or {'gone'}.
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
  local left = {}
  if terms.rates[1] > 0 or terms.rates[2] > 0 then
    local which, seconds
    left, which, seconds = take_rate(prefix, terms)
    if not left then return { 'full', #terms.limits + which, seconds } end
  end
  generation(prefix)
  local entry = redis.call('XADD', keys[1], '*', 'r', request, 'p', payload)
  redis.call('HSET', state, 'entry', entry, 'choices', terms.choices, 'prompt_tokens', terms.prompt_tokens,
    'epoch', 0, 'last', '0-0', 'window', terms.window, 'readers', terms.router, 'document', document,
    'tenant', terms.tenant, 'tokens', terms.tokens, 'key', terms.key, 'resumable', terms.resumable and 1 or 0,
    'outlives', terms.outlives and 1 or 0)
  if terms.key ~= '' then
    redis.call('SET', prefix .. 'idempotency:' .. terms.key, request .. ' ' .. terms.body)
  end
  add_load(prefix, terms.tenant, 1, terms.tokens)
  return { 'ok', unpack(left) }
end

redis.register_function('orca_v1_enqueue', enqueue)
