"""Redis commands on strings, hashes, lists, sets and sorted sets, as far as Baton uses them; importing registers
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Context, Decimal
from typing import TypeVar

from baton.drill.redis.store import (
    OK,
    Answer,
    CommandError,
    KeySpace,
    as_text,
    bound,
    command,
    expire,
    integer,
    pairs,
)

T = TypeVar("T")
LONG_DOUBLE = Context(prec=17)  # digits that HINCRBYFLOAT answers with

# ---- strings ----


@command("GET")
def _get(store: KeySpace, args: list[bytes]) -> Answer:
    return store.find(args[0], "string")


@command("MGET")
def _mget(store: KeySpace, args: list[bytes]) -> Answer:
    return [store.find(key, "string") if store.kinds.get(key) in (None, "string") else None for key in args]


@command("SET")
def _set(store: KeySpace, args: list[bytes]) -> Answer:
    key, value, *options = args
    unit = {b"EX": 1, b"PX": 1000}.get(options[0].upper()) if len(options) == 2 else None
    if options and unit is None:
        raise CommandError("ERR syntax error")
    seconds = integer(options[1]) / unit if unit else None
    if seconds is not None and seconds <= 0:
        raise CommandError("ERR invalid expire time in 'set' command")
    store.set(key, value)
    if seconds is not None:
        expire(store, key, seconds)
    return OK


@command("STRLEN")
def _strlen(store: KeySpace, args: list[bytes]) -> Answer:
    return len(store.find(args[0], "string") or b"")


@command("INCR")
def _incr(store: KeySpace, args: list[bytes]) -> Answer:
    return _add(store, args[0], 1)


@command("INCRBY")
def _incrby(store: KeySpace, args: list[bytes]) -> Answer:
    return _add(store, args[0], integer(args[1]))


@command("DECRBY")
def _decrby(store: KeySpace, args: list[bytes]) -> Answer:
    return _add(store, args[0], -integer(args[1]))


def _add(store: KeySpace, key: bytes, by: int) -> int:
    found = store.find(key, "string")
    now = integer(b"0" if found is None else found) + by
    if not -(1 << 63) <= now < 1 << 63:
        raise CommandError("ERR increment or decrement would overflow")
    store.make(key, "string", bytes)
    store.values[key] = b"%d" % now
    return now


# ---- containers of members ----


def _grown(store: KeySpace, key: bytes, kind: str, members: Mapping[bytes, object]) -> int:
    """Adds members to a hash, a set or a sorted set; returns how many are new."""
    found = store.make(key, kind, dict)
    before = len(found)
    found.update(members)
    return len(found) - before


def _remove(store: KeySpace, key: bytes, kind: str, members: list[bytes]) -> int:
    """Removes members from a hash, a set or a sorted set; returns how many there were."""
    found = store.find(key, kind)
    if found is None:
        return 0
    gone = sum(found.pop(member, store) is not store for member in members)
    if gone:
        store.touched(key)
    store.drop_if_empty(key)
    return gone


# ---- hashes ----


def _hash(store: KeySpace, key: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = store.find(key, "hash") or {}
    return found


@command("HSET")
def _hset(store: KeySpace, args: list[bytes]) -> Answer:
    return _grown(store, args[0], "hash", dict(pairs(args[1:])))


@command("HSETNX")
def _hsetnx(store: KeySpace, args: list[bytes]) -> Answer:
    if args[1] in _hash(store, args[0]):
        return 0
    store.make(args[0], "hash", dict)[args[1]] = args[2]
    return 1


@command("HGET")
def _hget(store: KeySpace, args: list[bytes]) -> Answer:
    return _hash(store, args[0]).get(args[1])


@command("HMGET")
def _hmget(store: KeySpace, args: list[bytes]) -> Answer:
    fields = _hash(store, args[0])
    return [fields.get(name) for name in args[1:]]


@command("HGETALL")
def _hgetall(store: KeySpace, args: list[bytes]) -> Answer:
    return [part for pair in _hash(store, args[0]).items() for part in pair]


@command("HSCAN")
def _hscan(store: KeySpace, args: list[bytes]) -> Answer:
    """All in one step: the cursor that a step gives back says that there is no further one."""
    return [b"0", _hgetall(store, args)]


@command("HVALS")
def _hvals(store: KeySpace, args: list[bytes]) -> Answer:
    return list(_hash(store, args[0]).values())


@command("HLEN")
def _hlen(store: KeySpace, args: list[bytes]) -> Answer:
    return len(_hash(store, args[0]))


@command("HEXISTS")
def _hexists(store: KeySpace, args: list[bytes]) -> Answer:
    return int(args[1] in _hash(store, args[0]))


@command("HDEL")
def _hdel(store: KeySpace, args: list[bytes]) -> Answer:
    return _remove(store, args[0], "hash", args[1:])


@command("HINCRBYFLOAT")
def _hincrbyfloat(store: KeySpace, args: list[bytes]) -> Answer:
    now = LONG_DOUBLE.add(_decimal(_hash(store, args[0]).get(args[1], b"0")), _decimal(args[2]))
    text = f"{LONG_DOUBLE.normalize(now):f}".encode()
    store.make(args[0], "hash", dict)[args[1]] = text
    return text


def _decimal(text: bytes) -> Decimal:
    if not math.isfinite(bound(text)):
        raise CommandError("ERR value is NaN or Infinity")
    return Decimal(text.decode())


# ---- sets ----


def _set_of(store: KeySpace, key: bytes) -> dict[bytes, None]:
    found: dict[bytes, None] = store.find(key, "set") or {}
    return found


@command("SADD")
def _sadd(store: KeySpace, args: list[bytes]) -> Answer:
    return _grown(store, args[0], "set", dict.fromkeys(args[1:]))


@command("SREM")
def _srem(store: KeySpace, args: list[bytes]) -> Answer:
    return _remove(store, args[0], "set", args[1:])


@command("SISMEMBER")
def _sismember(store: KeySpace, args: list[bytes]) -> Answer:
    return int(args[1] in _set_of(store, args[0]))


@command("SMEMBERS")
def _smembers(store: KeySpace, args: list[bytes]) -> Answer:
    return list(_set_of(store, args[0]))


# ---- lists ----


def _list_of(store: KeySpace, key: bytes) -> list[bytes]:
    found: list[bytes] = store.find(key, "list") or []
    return found


@command("LPUSH")
def _lpush(store: KeySpace, args: list[bytes]) -> Answer:
    items = store.make(args[0], "list", list)
    items[:0] = args[:0:-1]
    return len(items)


@command("LRANGE")
def _lrange(store: KeySpace, args: list[bytes]) -> Answer:
    return _slice(_list_of(store, args[0]), args[1], args[2])


@command("LTRIM")
def _ltrim(store: KeySpace, args: list[bytes]) -> Answer:
    items = _list_of(store, args[0])
    if items:
        items[:] = _slice(items, args[1], args[2])
        store.touched(args[0])
        store.drop_if_empty(args[0])
    return OK


def _slice(items: list[T], first: bytes, last: bytes) -> list[T]:
    a, b = integer(first), integer(last)
    start = max(0, a if a >= 0 else len(items) + a)
    stop = (b if b >= 0 else len(items) + b) + 1
    return items[start : max(start, stop)]


# ---- sorted sets ----


def _sorted(store: KeySpace, key: bytes) -> list[tuple[float, bytes]]:
    scores: dict[bytes, float] = store.find(key, "zset") or {}
    return sorted((score, member) for member, score in scores.items())


@command("ZADD")
def _zadd(store: KeySpace, args: list[bytes]) -> Answer:
    scores = {member: bound(score) for score, member in pairs(args[1:])}
    return _grown(store, args[0], "zset", scores)


@command("ZREM")
def _zrem(store: KeySpace, args: list[bytes]) -> Answer:
    return _remove(store, args[0], "zset", args[1:])


@command("ZRANGE")
def _zrange(store: KeySpace, args: list[bytes]) -> Answer:
    found = _slice(_sorted(store, args[0]), args[1], args[2])
    if len(args) > 3 and args[3].upper() == b"WITHSCORES":
        return [part for score, member in found for part in (member, as_text(score))]
    return [member for _, member in found]


@command("ZREVRANGE")
def _zrevrange(store: KeySpace, args: list[bytes]) -> Answer:
    return [member for _, member in _slice(_sorted(store, args[0])[::-1], args[1], args[2])]


@command("ZREVRANK")
def _zrevrank(store: KeySpace, args: list[bytes]) -> Answer:
    members = [member for _, member in reversed(_sorted(store, args[0]))]
    return members.index(args[1]) if args[1] in members else None


@command("ZRANGEBYSCORE")
def _zrangebyscore(store: KeySpace, args: list[bytes]) -> Answer:
    low, high = bound(args[1]), bound(args[2])
    return [member for score, member in _sorted(store, args[0]) if low <= score <= high]


@command("ZREMRANGEBYSCORE")
def _zremrangebyscore(store: KeySpace, args: list[bytes]) -> Answer:
    return _remove(store, args[0], "zset", _zrangebyscore(store, args))
