"""What happens to samples in Redis atomically: Lua, run by `store`, `endings` and `feeds`.

Beside a pool's sorted set of unfinished requests are two hashes: `:whose` has the owner of each, `:owners` how many
each owner has. Every request leaves all three at once. Its score is the time from which on nobody is expected to hold
it: its arrival; once it is claimed, the end of the claim; 0 when a claim was given up.

A feed has three keys below its prefix. `:log` is a sorted set of `<state><size> <request id>` by cursor, a time in
microseconds that grows strictly, so that it goes on growing after Redis has lost everything. `:open` holds the requests
that were accepted and whose end the client has not acknowledged. `:polled` says that a client reads this feed; where
the setting does not ask for feeds, it is what makes us keep one.
"""

from __future__ import annotations

FEED_TTL_S = 86400
FEED_LENGTH = 50_000
"""A feed forgets its oldest entries beyond this; more samples than this do not wait at a time."""
SMALL_SHARE = 256
"""Of a pool that is full an owner may still have so many unfinished requests, or as many as are his equal share of the
pool's limit if that is less: nobody can lock others out by filling it."""
REFUSAL_NOTED_S = 5
"""How long it is remembered that an owner was refused."""

_SHARED = f"""
local function now_us()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

local function announce(feed, id, entry)
  local log, at = feed .. ':log', now_us()
  local last = redis.call('ZREVRANGE', log, 0, 0, 'WITHSCORES')[2]
  if last and tonumber(last) >= at then at = tonumber(last) + 1 end
  redis.call('ZADD', log, string.format('%.0f', at), entry .. ' ' .. id)
  redis.call('ZREMRANGEBYRANK', log, 0, -{FEED_LENGTH + 1})
  redis.call('EXPIRE', log, {FEED_TTL_S})
end

local function is_lost(id)
  return redis.call('EXISTS', 'sample:' .. id .. ':request', 'sample:' .. id .. ':result') == 0
end

local function leave(unfinished, id)
  redis.call('ZREM', unfinished, id)
  local owner = redis.call('HGET', unfinished .. ':whose', id)
  if not owner then return end
  redis.call('HDEL', unfinished .. ':whose', id)
  if redis.call('HINCRBY', unfinished .. ':owners', owner, -1) < 1 then
    redis.call('HDEL', unfinished .. ':owners', owner)
  end
end

local function count(id, change, ttl_s)
  local claims = 'sample:' .. id .. ':claims'
  if redis.call('EXISTS', claims) == 0 then return end  -- over, meanwhile
  redis.call('INCRBY', claims, change)
  redis.call('EXPIRE', claims, ttl_s)
end

local function finish(unfinished, id, raw, feed, entry, ttl_s)
  if redis.call('SET', 'sample:' .. id .. ':result', raw, 'NX', 'EX', ttl_s) then
    redis.call('EXPIRE', 'sample:' .. id .. ':request', ttl_s)
    if redis.call('ZSCORE', feed .. ':open', id) then announce(feed, id, entry) end
  end
  leave(unfinished, id)
  redis.call('DEL', 'sample:' .. id .. ':claim', 'sample:' .. id .. ':claims')
  redis.call('EXPIRE', 'sample:' .. id .. ':tokens', ttl_s)
end
"""

SUBMIT = (
    _SHARED
    + f"""
local request, unfinished, refused = KEYS[1], KEYS[2], KEYS[3]
local body, ttl_s, id, owner, max_of_pool, max_of_owner, feed, keep_feed = unpack(ARGV)
if redis.call('EXISTS', request) == 1 then return redis.call('GET', request) end

local owners = unfinished .. ':owners'
local own = tonumber(redis.call('HGET', owners, owner) or 0)
local full = nil
if own >= tonumber(max_of_owner) then
  full = 'owner full'
elseif redis.call('ZCARD', unfinished) >= tonumber(max_of_pool) then
  local tenants = redis.call('HLEN', owners)
  if own == 0 then tenants = tenants + 1 end
  if own >= math.max(1, math.min({SMALL_SHARE}, math.floor(max_of_pool / tenants))) then full = 'pool full' end
end
if full then
  redis.call('SET', refused, full, 'EX', {REFUSAL_NOTED_S})
  return full
end

redis.call('SET', request, body, 'EX', ttl_s)
local at = now_us()
redis.call('ZADD', unfinished, at / 1000000, id)
redis.call('HSET', unfinished .. ':whose', id, owner)
redis.call('HINCRBY', owners, owner, 1)
if keep_feed == '1' or redis.call('EXISTS', feed .. ':polled') == 1 then
  redis.call('ZADD', feed .. ':open', string.format('%.0f', at), id)
  redis.call('ZREMRANGEBYRANK', feed .. ':open', 0, -{FEED_LENGTH + 1})
  redis.call('EXPIRE', feed .. ':open', {FEED_TTL_S})
end
return 'new'
"""
)

CLAIM = (
    _SHARED
    + """
local unfinished, got = KEYS[1], {}
local holder, claim_ms, ttl_s = ARGV[1], ARGV[2], ARGV[3]
local claim_ends = now_us() / 1000000 + claim_ms / 1000
for i = 4, #ARGV do
  local id = ARGV[i]
  if redis.call('ZSCORE', unfinished, id)
    and redis.call('SET', 'sample:' .. id .. ':claim', holder, 'NX', 'PX', claim_ms) then
    local body = redis.call('GET', 'sample:' .. id .. ':request')
    if body then
      local claims = 'sample:' .. id .. ':claims'
      got[#got + 1] = id
      got[#got + 1] = body
      got[#got + 1] = tostring(redis.call('INCR', claims))
      redis.call('EXPIRE', claims, ttl_s)
      redis.call('ZADD', unfinished, 'XX', claim_ends, id)
    else
      leave(unfinished, id)
      redis.call('DEL', 'sample:' .. id .. ':claim')
    end
  end
end
return got
"""
)

RENEW = (
    _SHARED
    + """
local unfinished, over = KEYS[1], {}
local me, claim_ms, ttl_s = ARGV[1], ARGV[2], ARGV[3]
local claim_ends = now_us() / 1000000 + claim_ms / 1000
for i = 4, #ARGV do
  local id = ARGV[i]
  local claim = 'sample:' .. id .. ':claim'
  if redis.call('EXISTS', 'sample:' .. id .. ':result') == 1
    or redis.call('EXPIRE', 'sample:' .. id .. ':request', ttl_s) == 0 then
    over[#over + 1] = id
  else
    redis.call('EXPIRE', 'sample:' .. id .. ':claims', ttl_s)
    local holder = redis.call('GET', claim)
    if not holder or holder == me then
      redis.call('SET', claim, me, 'PX', claim_ms)
      redis.call('ZADD', unfinished, 'XX', claim_ends, id)
    end
  end
end
return over
"""
)

RELEASE = (
    _SHARED
    + """
local unfinished = KEYS[1]
local me, ttl_s = ARGV[1], ARGV[2]
for i = 3, #ARGV do
  local id = ARGV[i]
  if redis.call('GET', 'sample:' .. id .. ':claim') == me then
    redis.call('DEL', 'sample:' .. id .. ':claim')
    count(id, -1, ttl_s)
    redis.call('ZADD', unfinished, 'XX', 0, id)
  end
end
"""
)

COUNT = (
    _SHARED
    + """
for i = 3, #ARGV do count(ARGV[i], ARGV[1], ARGV[2]) end
"""
)

ABANDONED = (
    _SHARED
    + """
local latest = now_us() / 1000000 - ARGV[1]
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', latest, 'LIMIT', 0, ARGV[2])
"""
)

FINISH = (
    _SHARED
    + """
local ids = {}
for i = 3, #ARGV, 4 do
  finish(KEYS[1], ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[1])
  ids[#ids + 1] = ARGV[i]
end
redis.call('PUBLISH', ARGV[2], table.concat(ids, '\\n'))
"""
)

CANCEL = (
    _SHARED
    + """
local ttl_s, done, cancelled, id, raw, feed, entry = unpack(ARGV)
if redis.call('EXISTS', 'sample:' .. id .. ':request') == 0 then return 0 end
if redis.call('EXISTS', 'sample:' .. id .. ':result') == 1 then return 0 end
finish(KEYS[1], id, raw, feed, entry, ttl_s)
redis.call('PUBLISH', cancelled, id)
redis.call('PUBLISH', done, id)
return 1
"""
)

FORGET_SAMPLES = (
    _SHARED
    + """
local unfinished, gone = KEYS[1], {}
for i = 3, #ARGV do
  local id = ARGV[i]
  if redis.call('ZSCORE', unfinished, id) and redis.call('EXISTS', 'sample:' .. id .. ':result') == 0 then
    leave(unfinished, id)
    for _, part in ipairs({'request', 'claim', 'claims', 'tokens'}) do
      redis.call('DEL', 'sample:' .. id .. ':' .. part)
    end
    gone[#gone + 1] = id
  end
end
if #gone > 0 then
  redis.call('PUBLISH', ARGV[1], table.concat(gone, '\\n'))
  redis.call('PUBLISH', ARGV[2], table.concat(gone, '\\n'))
end
return #gone
"""
)

FIND = """
local size = redis.call('STRLEN', KEYS[1])
local first = ''
if size > 0 then first = redis.call('GETRANGE', KEYS[1], 0, ARGV[1] - 1) end
return {size, first, redis.call('EXISTS', KEYS[2])}
"""

READ_FEED = (
    _SHARED
    + f"""
local feed, cursor, limit, look_every_ms, look_limit, told_channel = unpack(ARGV)
local log, open = feed .. ':log', feed .. ':open'
redis.call('SET', feed .. ':polled', 1, 'EX', {FEED_TTL_S})
local told = {{}}
for i, entry in ipairs(redis.call('ZRANGEBYSCORE', log, '-inf', cursor)) do
  told[i] = string.match(entry, '^%S+ (.*)$')
  redis.call('ZREM', open, told[i])
end
if #told > 0 then redis.call('PUBLISH', told_channel, table.concat(told, '\\n')) end
redis.call('ZREMRANGEBYSCORE', log, '-inf', '(' .. cursor)
if redis.call('SET', feed .. ':looked', 1, 'NX', 'PX', look_every_ms) then
  for _, id in ipairs(redis.call('ZRANGE', open, 0, look_limit - 1)) do
    if is_lost(id) then
      redis.call('ZREM', open, id)
      announce(feed, id, 'x')
    end
  end
end
return redis.call('ZRANGEBYSCORE', log, '(' .. cursor, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
"""
)

FORGET_RESULTS = """
for i, id in ipairs(ARGV) do
  if i > 1 and redis.call('TTL', 'sample:' .. id .. ':result') > tonumber(ARGV[1]) then
    redis.call('EXPIRE', 'sample:' .. id .. ':result', ARGV[1])
    redis.call('EXPIRE', 'sample:' .. id .. ':request', ARGV[1])
  end
end
"""

REMIND = (
    _SHARED
    + """
local over = {}
for i = 2, #ARGV, 2 do
  local id, feed = ARGV[i], ARGV[i + 1]
  local result = 'sample:' .. id .. ':result'
  local size = redis.call('STRLEN', result)
  local entry = 'x'
  if size > 0 and redis.call('GETRANGE', result, 0, 0) == 'p' then entry = 'f' .. (size - 1) end
  if size > 0 or is_lost(id) then
    over[#over + 1] = id
    if not redis.call('ZSCORE', feed .. ':log', entry .. ' ' .. id) then announce(feed, id, entry) end
  end
end
if #over > 0 then redis.call('PUBLISH', ARGV[1], table.concat(over, '\\n')) end
"""
)
