"""What happens to samples in Redis atomically: Lua, run by `store` and `feeds`.

A feed has three keys below its prefix. `:log` is a sorted set of `<state><size> <request id>` by cursor, a time in
microseconds that grows strictly, so that it goes on growing after Redis has lost everything. `:open` holds the requests
that were accepted and whose end the client has not acknowledged. `:polled` says that a client reads this feed; where
the setting does not ask for feeds, it is what makes us keep one.
"""

from __future__ import annotations

FEED_TTL_S = 86400
FEED_LENGTH = 50_000
"""A feed forgets its oldest entries beyond this; more samples than this do not wait at a time."""

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

local function finish(unfinished, id, raw, feed, entry, ttl_s)
  if redis.call('SET', 'sample:' .. id .. ':result', raw, 'NX', 'EX', ttl_s) then
    redis.call('EXPIRE', 'sample:' .. id .. ':request', ttl_s)
    if redis.call('ZSCORE', feed .. ':open', id) then announce(feed, id, entry) end
  end
  redis.call('ZREM', unfinished, id)
  redis.call('DEL', 'sample:' .. id .. ':claim')
end
"""

SUBMIT = (
    _SHARED
    + f"""
local request, unfinished = KEYS[1], KEYS[2]
local body, max_waiting, ttl_s, id, feed, keep_feed = unpack(ARGV)
if redis.call('EXISTS', request) == 1 then return redis.call('GET', request) end
if redis.call('ZCARD', unfinished) >= tonumber(max_waiting) then return 'full' end
redis.call('SET', request, body, 'EX', ttl_s)
local at = now_us()
redis.call('ZADD', unfinished, at / 1000000, id)
if keep_feed == '1' or redis.call('EXISTS', feed .. ':polled') == 1 then
  redis.call('ZADD', feed .. ':open', string.format('%.0f', at), id)
  redis.call('ZREMRANGEBYRANK', feed .. ':open', 0, -{FEED_LENGTH + 1})
  redis.call('EXPIRE', feed .. ':open', {FEED_TTL_S})
end
return 'new'
"""
)

CLAIM = """
local got = {}
for i, id in ipairs(ARGV) do
  if i > 2 then
    local unfinished = redis.call('ZSCORE', KEYS[1], id)
    if unfinished and redis.call('SET', 'sample:' .. id .. ':claim', ARGV[1], 'NX', 'PX', ARGV[2]) then
      local body = redis.call('GET', 'sample:' .. id .. ':request')
      if body then
        redis.call('INCR', 'sample:' .. id .. ':claims')
        redis.call('EXPIRE', 'sample:' .. id .. ':claims', 3600)
        got[#got + 1] = id
        got[#got + 1] = body
        got[#got + 1] = redis.call('GET', 'sample:' .. id .. ':claims')
      else
        redis.call('ZREM', KEYS[1], id)
      end
    end
  end
end
return got
"""

RENEW = """
local over = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  local key = 'sample:' .. id .. ':claim'
  if redis.call('EXISTS', 'sample:' .. id .. ':result') == 1 then
    over[#over + 1] = id
  else
    local holder = redis.call('GET', key)
    if not holder or holder == ARGV[1] then redis.call('SET', key, ARGV[1], 'PX', ARGV[2]) end
  end
end
return over
"""

RELEASE = """
for i = 1, #KEYS, 2 do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    redis.call('DEL', KEYS[i])
    redis.call('DECR', KEYS[i + 1])
    redis.call('EXPIRE', KEYS[i + 1], ARGV[2])
  end
end
"""

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

FORGET = """
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
