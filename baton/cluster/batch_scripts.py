"""Redis (Lua) scripts of the store of batch jobs; each checks and writes atomically."""

from __future__ import annotations

# KEYS: owner, fence, open jobs; ARGV: job, who, lease ms, seconds that the job is kept. The claim's number; 0 where
# another has the job, or it is closed.
CLAIM = """
if redis.call('SISMEMBER', KEYS[3], ARGV[1]) == 0 or redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local number = redis.call('INCR', KEYS[2])
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return number
"""
# What the scripts below begin with. KEYS: fence, …; ARGV: the claim's number, …. 0: a later claim was given.
FENCE = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end\n"
# KEYS: fence, owner, open jobs; ARGV: number, job, who, lease ms, seconds that the job is kept.
RENEW = f"""{FENCE}
if redis.call('SISMEMBER', KEYS[3], ARGV[2]) == 0 then return 0 end
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return 1
"""
# KEYS: fence, owner; ARGV: number.
RELEASE = f"{FENCE} redis.call('DEL', KEYS[2]) return 1"
# KEYS: fence, answers; ARGV: number, line, answer, seconds that it is kept.
ANSWER = f"""{FENCE}
redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return 1
"""
# KEYS: fence, job; ARGV: number, state, seconds that it is kept.
UPDATE = f"{FENCE} redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3]) return 1"
# KEYS: fence, job, open jobs, answers, bad answers; ARGV: number, state, seconds that it is kept, job's id. Done
# again it changes nothing: nobody can claim a job that isn't open.
CLOSE = f"""{FENCE}
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('SREM', KEYS[3], ARGV[4])
redis.call('DEL', KEYS[4], KEYS[5])
return 1
"""
# KEYS: file, list of all, of the tenant, its kept files (id:bytes by when they go), their bytes; fence, if any.
# ARGV: id, bytes, created, seconds that it is kept, most bytes (-1: any), about, content, claim's number. The bytes
# kept already where it would be too much, else -1; -2: a later claim was given.
ADD = """
if KEYS[6] and redis.call('GET', KEYS[6]) ~= ARGV[8] then return -2 end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', ARGV[3])) do
  redis.call('ZREM', KEYS[4], gone)
  redis.call('DECRBY', KEYS[5], string.match(gone, ':(%d+)$'))
end
local kept, most = tonumber(redis.call('GET', KEYS[5]) or 0), tonumber(ARGV[5])
if most >= 0 and kept + ARGV[2] > most then return kept end
redis.call('HSET', KEYS[1], 'about', ARGV[6], 'content', ARGV[7])
for list = 2, 3 do
  redis.call('ZREMRANGEBYSCORE', KEYS[list], '-inf', ARGV[3] - ARGV[4])
  redis.call('ZADD', KEYS[list], ARGV[3], ARGV[1])
end
local new = redis.call('ZADD', KEYS[4], ARGV[3] + ARGV[4], ARGV[1] .. ':' .. ARGV[2])
if new == 1 then redis.call('INCRBY', KEYS[5], ARGV[2]) end
for key = 1, 5 do redis.call('EXPIRE', KEYS[key], ARGV[4]) end
return -1
"""
# KEYS as above; ARGV: id, bytes.
DROP = """
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
if redis.call('ZREM', KEYS[4], ARGV[1] .. ':' .. ARGV[2]) == 1 then redis.call('DECRBY', KEYS[5], ARGV[2]) end
return 1
"""
