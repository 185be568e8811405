"""The model of Redis answers as a real server does: the same bytes to the same commands and to our own scripts."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.cluster import batch_scripts, departures, membership, prefix_index, roster_news
from baton.cluster.store import buckets, lease, records, slot_lease
from baton.drill.redis.lua import Script
from baton.drill.redis.server import Session
from baton.drill.redis.store import KeySpace
from baton.launch.redis_server import RedisServer as RealServer

UNORDERED = {"SMEMBERS", "HGETALL", "HVALS"}
CLOCK_MS = 2000  # by which two clocks may differ in an answer that tells a time

keys = st.sampled_from(["a", "b", "c"])
members = st.sampled_from(["m1", "m2", "7:m3", "9:m4"])
numbers = st.integers(-3, 12).map(str)
scores = st.sampled_from(["-inf", "inf", "0", "1", "2.5", "7"])
values = st.sampled_from(["", "x", "12", "-4", "hello"])
COMMANDS = st.one_of(
    st.tuples(st.sampled_from(["GET", "DEL", "EXISTS", "STRLEN", "INCR", "PTTL"]), keys),
    st.tuples(st.sampled_from(["SMEMBERS", "HGETALL", "HVALS", "HLEN"]), keys),
    st.tuples(st.sampled_from(["INCRBY", "DECRBY"]), keys, numbers),
    st.tuples(st.sampled_from(["EXPIRE", "PEXPIRE"]), keys, st.sampled_from(["100000", "-1", "0"])),
    st.tuples(st.just("SET"), keys, values),
    st.tuples(st.just("SET"), keys, values, st.sampled_from(["EX", "PX"]), st.just("90000")),
    st.tuples(st.just("MGET"), keys, keys),
    st.tuples(st.sampled_from(["HSET", "HSETNX"]), keys, members, values),
    st.tuples(st.sampled_from(["HGET", "HDEL", "HEXISTS", "SADD", "SREM", "SISMEMBER"]), keys, members),
    st.tuples(st.sampled_from(["HMGET", "SADD", "SREM", "HDEL", "LPUSH", "ZREM"]), keys, members, members),
    st.tuples(st.just("HINCRBYFLOAT"), keys, members, st.sampled_from(["1", "-2.5", "0.25"])),
    st.tuples(st.sampled_from(["LRANGE", "LTRIM", "ZRANGE", "ZREVRANGE"]), keys, numbers, numbers),
    st.tuples(st.just("ZRANGE"), keys, numbers, numbers, st.just("WITHSCORES")),
    st.tuples(st.just("ZADD"), keys, st.sampled_from(["0", "1", "2.5", "7"]), members),
    st.tuples(st.sampled_from(["ZRANGEBYSCORE", "ZREMRANGEBYSCORE"]), keys, scores, scores),
    st.tuples(st.just("ZREVRANK"), keys, members),
    st.tuples(st.sampled_from(["MULTI", "EXEC", "DISCARD", "UNWATCH", "NOSUCH"])),
    st.tuples(st.just("WATCH"), keys),
)
HASHES = [f"{number:016d}" for number in range(6)]
blobs = st.lists(st.sampled_from(HASHES), max_size=5).map("".join)
ids, who = st.sampled_from(["j1", "j2"]), st.sampled_from(["r1", "r2"])
fences = st.integers(0, 3).map(str)


def script(text: str, places: str, *args: Any) -> st.SearchStrategy[tuple[str, ...]]:
    """Calls of a script with its keys and arguments, each a text or a strategy."""
    drawn = st.tuples(*(st.just(arg) if isinstance(arg, str) else arg for arg in args))
    return drawn.map(lambda found: ("EVAL", text, str(len(places.split())), *places.split(), *found))


place = st.sampled_from(["p1", "p2"])
LEASE, KEPT = "60000", "900"
BEAT, BEATEN = membership._ENTRY + prefix_index.CHANGE, "workers entry:w1 news"
FILE = "file all tenant kept sum"
sizes = st.sampled_from(["10", "60"])
SCRIPTS = st.one_of(
    script(BEAT, f"p1 {BEATEN}", "sentinel", "5000", blobs, blobs, "w1", values, values),
    script(membership._ENTRY + "return 1", f"p1 {BEATEN}", "", "5000", "", "", "w1", values, values),
    script(roster_news._NEWS, "workers news", "entry:", st.integers(-1, 4).map(str)),
    script(prefix_index.CHANGE, "p1", "sentinel", "5000", blobs, blobs),
    script(prefix_index.CHANGE, "p2", "sentinel", "5000", blobs, blobs),
    script(prefix_index._LONGEST, "p1 p2", blobs.filter(bool)),
    script(departures._NOTE, "gone known times", members, values, scores, st.sampled_from("01"), "1", "2", "3600"),
    script(records._PUT, "list bytes", "rec:", LEASE, st.sampled_from(["450", "100000"]), ids, values, ids, values),
    script(lease._HOLD, "lease", who, LEASE),
    script(lease._LEAVE, "lease", who),
    script(slot_lease._TAKE, "slot epoch", who, place, LEASE, who),
    script(slot_lease._KEEP, "slot epoch", who, "p1", LEASE, who, who),
    script(slot_lease._DROP, "slot", who),
    script(batch_scripts.CLAIM, "owner fence open", ids, who, LEASE, KEPT),
    script(batch_scripts.RENEW, "fence owner open", fences, ids, who, LEASE, KEPT),
    script(batch_scripts.RELEASE, "fence owner", fences),
    script(batch_scripts.ANSWER, "fence out", fences, st.sampled_from("01"), values, KEPT),
    script(batch_scripts.UPDATE, "fence job", fences, values, KEPT),
    script(batch_scripts.CLOSE, "fence job open out errors", fences, values, KEPT, ids),
    script(batch_scripts.ADD, FILE, ids, sizes, st.integers(1, 1000).map(str), "500", "100", values, values),
    script(batch_scripts.ADD, FILE, ids, sizes, st.integers(1, 1000).map(str), "500", "-1", values, values),
    script(batch_scripts.ADD, f"{FILE} fence", ids, "10", "5", "500", "-1", values, values, fences),
    script(batch_scripts.DROP, FILE, ids, sizes),
    script(buckets._SPEND, "bucket", st.sampled_from(["1", "2.5"])),
)
OPENING = st.sampled_from([("SADD", "open", "j1"), ("SADD", "p1", "sentinel"), ("SADD", "open", "j2")])


class Real:
    """A connection to a real server, which tells raw answers."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("rb")

    def ask(self, words: tuple[str, ...]) -> Any:
        self._socket.sendall(packed(words))
        return answer_of(self._file.readline, self._file.read)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def packed(words: tuple[str, ...]) -> bytes:
    parts = [b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()) for word in words]
    return b"*%d\r\n" % len(words) + b"".join(parts)


def answer_of(line: Callable[[], bytes], read: Callable[[int], bytes]) -> Any:
    head = line()
    kind, rest = head[:1], head[1:-2]
    if kind == b"$":
        return None if rest == b"-1" else read(int(rest) + 2)[:-2]
    if kind == b"*":
        return None if rest == b"-1" else [answer_of(line, read) for _ in range(int(rest))]
    if kind == b"-":
        return "error", rest.split()[0]
    return kind, rest


def of_model(session: Session, words: tuple[str, ...]) -> Any:
    stream = io.BytesIO(session.feed(packed(words)))
    return answer_of(stream.readline, stream.read)


@pytest.fixture(scope="module")
def real(server: RealServer) -> Iterator[Real]:
    one = Real(server.url.removeprefix("unix://").partition("?")[0])
    yield one
    one.close()


class Bare:
    """Has the attributes that a session needs of a server."""

    def __init__(self) -> None:
        self.store = KeySpace(time.time)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(COMMANDS, SCRIPTS, OPENING), min_size=1, max_size=40))
def test_the_model_answers_as_a_real_server_does(real: Real, asked: list[tuple[str, ...]]) -> None:
    real.ask(("DISCARD",))
    real.ask(("FLUSHALL",))
    session = Session(Bare())  # type: ignore[arg-type]
    queued: list[str] = []
    for words in asked:
        ours, theirs = of_model(session, words), real.ask(words)
        if words[0] == "EXEC" and isinstance(ours, list) and isinstance(theirs, list):
            assert len(ours) == len(theirs), asked
            pairs = list(zip(queued, ours, theirs, strict=True))
        else:
            pairs = [(words[0], ours, theirs)]
        for name, mine, other in pairs:
            assert alike(name, mine, other), f"{words}: {mine!r}, the real one {other!r}"
        if ours == (b"+", b"QUEUED"):
            queued.append(words[0])
        elif words[0] in ("EXEC", "DISCARD"):
            queued = []
        if words[0] == "NOSUCH":
            real.ask(("DISCARD",))
            of_model(session, ("DISCARD",))
            queued = []


# After a refused MULTI or WATCH within a transaction Redis 7 executes the rest and Valkey aborts: no EXEC there.
ODD = (
    ("EXEC",), ("DISCARD",), ("MULTI", "MULTI", "DISCARD"), ("MULTI", "WATCH a", "DISCARD"),
    ("MULTI", "UNWATCH", "EXEC"),
    ("MULTI", "NOSUCH", "SET a 1", "EXEC", "GET a"), ("SET a x EX y", "GET a"), ("SET a 1 ZZ 5", "GET a"),
    ("SET a 1 EX 0", "GET a"), ("SET a 1_0", "INCR a"), ("SET a 05", "INCR a"), ("GET",), ("HSET a f",),
    ("SET a 9223372036854775807", "INCR a", "GET a"), ("ZADD a 1_0 m",), ("ZADD a nan m",), ("ZADD a 1",),
    ("HINCRBYFLOAT a f nan",), ("HINCRBYFLOAT h f 0.1", "HINCRBYFLOAT h f 0.2"), ("SADD a m", "INCR a"),
)  # fmt: skip


@pytest.mark.parametrize("lines", ODD)
def test_what_is_odd_is_refused_as_a_real_server_refuses_it(real: Real, lines: tuple[str, ...]) -> None:
    real.ask(("DISCARD",))
    real.ask(("FLUSHALL",))
    session = Session(Bare())  # type: ignore[arg-type]
    for line in lines:
        words = tuple(line.split())
        assert of_model(session, words) == real.ask(words), line


def alike(name: str, ours: Any, theirs: Any) -> bool:
    if name == "PTTL" and isinstance(ours, tuple) and int(theirs[1]) > 0:
        return abs(int(ours[1]) - int(theirs[1])) < CLOCK_MS
    if name in UNORDERED and isinstance(ours, list) and isinstance(theirs, list):
        return sorted(map(repr, ours)) == sorted(map(repr, theirs))
    return bool(ours == theirs)


def test_what_no_script_of_ours_needs_is_refused_by_name() -> None:
    for text in ("local f = function() end", "return {a = 1}", "return 2 ^ 3", 'return "x"', "goto on"):
        with pytest.raises(SyntaxError):
            Script(text)
