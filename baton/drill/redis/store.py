"""A model of Redis's data and of the commands that Baton uses: takes bytes and returns Python values, without
sockets.

Knows nothing of connections. An answer is None, an int, bytes, ``Status``, or a list of answers. What Redis refuses
raises ``CommandError``. Keys expire by ``clock``, wall-clock seconds. ``tests/drill/redis`` compares it with a real
server, command by command.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from baton.drill.redis.lua import Script
from baton.drill.redis.lua_values import LuaError, Table, Value

StoredValue = Any  # bytes, dict or list, as ``KeySpace.kinds`` says of its key
Answer = Any  # None, int, bytes, Status, or a list of these
Snapshot = tuple[dict[bytes, StoredValue], dict[bytes, str], dict[bytes, float]]
Handler = Callable[["KeySpace", list[bytes]], Answer]
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
WHOLE = re.compile(rb"0|-?[1-9][0-9]*")
NUMBER = re.compile(rb"[-+]?(\d+\.?\d*(e[-+]?\d+)?|\.\d+|inf|infinity)", re.IGNORECASE)
NO_INTEGER = "ERR value is not an integer or out of range"


class CommandError(Exception):
    """Raised for a command that Redis answers with an error; the message is the error's text."""


class Status(NamedTuple):
    """A simple-string answer, such as OK."""

    text: str


OK = Status("OK")
COMMANDS: dict[bytes, Handler] = {}


def command(*names: str) -> Callable[[Handler], Handler]:
    """Returns a decorator that registers a handler for the commands ``names``."""

    def register(handler: Handler) -> Handler:
        COMMANDS.update({name.encode(): handler for name in names})
        return handler

    return register


class KeySpace:
    """All keys with their values, types and expiry times.

    A value is bytes for a string; a dict for a hash, a set (values None) or a sorted set (values are scores); or a
    list.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.values: dict[bytes, StoredValue] = {}
        self.kinds: dict[bytes, str] = {}
        self.expires: dict[bytes, float] = {}
        self.versions: dict[bytes, int] = {}  # of keys, for WATCH
        self.scripts: dict[bytes, Script] = {}
        self.max_bytes = 0

    def run(self, words: list[bytes]) -> Answer:
        """Runs one command, name and arguments, and returns its answer. Raises CommandError."""
        handler = COMMANDS.get(words[0].upper())
        if handler is None:
            raise CommandError(f"ERR unknown command '{words[0].decode(errors='replace')}'")
        try:
            return handler(self, words[1:])
        except IndexError:
            raise CommandError("ERR wrong number of arguments") from None

    def snapshot(self) -> Snapshot:
        """Returns a deep copy of all data, for ``restore``."""
        return copy.deepcopy((self.values, self.kinds, self.expires))

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces all data by those of ``snapshot``."""
        self.values, self.kinds, self.expires = copy.deepcopy(snapshot)
        self._touch_all()

    def flush(self) -> None:
        """Deletes all keys and their values."""
        self.values.clear()
        self.kinds.clear()
        self.expires.clear()
        self._touch_all()

    # ---- keys ----

    def find(self, key: bytes, kind: str) -> StoredValue:
        """Returns the value of ``key``, None if it doesn't exist. Raises CommandError if its type isn't
        ``kind``.
        """
        self.expire_due(key)
        if key not in self.values:
            return None
        if self.kinds[key] != kind:
            raise CommandError(WRONG_TYPE)
        return self.values[key]

    def make(self, key: bytes, kind: str, empty: Callable[[], StoredValue]) -> StoredValue:
        """Returns the value of ``key`` for changing it, after creating it by ``empty()`` if needed; counts a
        change.

        Raises CommandError if its type isn't ``kind``.
        """
        found = self.find(key, kind)
        if found is None:
            found = self.values[key] = empty()
            self.kinds[key] = kind
        self.touched(key)
        return found

    def set(self, key: bytes, value: bytes) -> None:
        """Sets ``key`` to a string that doesn't expire."""
        self.values[key], self.kinds[key] = value, "string"
        self.expires.pop(key, None)
        self.touched(key)

    def drop(self, key: bytes) -> bool:
        """Deletes ``key``; returns whether it existed."""
        self.expire_due(key)
        self.expires.pop(key, None)
        self.kinds.pop(key, None)
        found = self.values.pop(key, None) is not None
        if found:
            self.touched(key)
        return found

    def drop_if_empty(self, key: bytes) -> None:
        """Deletes ``key`` if its value is a container without members, as Redis does."""
        if not self.values.get(key, True):
            self.drop(key)

    def touched(self, key: bytes) -> None:
        """Counts a change of ``key``, by which WATCH notices it."""
        self.versions[key] = self.versions.get(key, 0) + 1

    def expire_due(self, key: bytes) -> None:
        """Deletes ``key`` if its expiry time has passed."""
        if self.expires.get(key, math.inf) <= self.clock():
            del self.expires[key], self.values[key], self.kinds[key]
            self.touched(key)

    def _touch_all(self) -> None:
        for key in {*self.versions, *self.values}:
            self.touched(key)


# ---- scripts ----


@command("SCRIPT")
def _script(store: KeySpace, args: list[bytes]) -> Answer:
    if args[0].upper() == b"EXISTS":
        return [int(sha in store.scripts) for sha in args[1:]]
    if args[0].upper() != b"LOAD":
        raise CommandError("ERR unknown subcommand")
    sha = hashlib.sha1(args[1], usedforsecurity=False).hexdigest().encode()
    store.scripts[sha] = _read(args[1])
    return sha


@command("EVALSHA")
def _eval_sha(store: KeySpace, args: list[bytes]) -> Answer:
    if args[0] not in store.scripts:
        raise CommandError("NOSCRIPT No matching script. Please use EVAL.")
    return _run(store, store.scripts[args[0]], args[1:])


@command("EVAL")
def _eval(store: KeySpace, args: list[bytes]) -> Answer:
    _script(store, [b"LOAD", args[0]])
    return _run(store, _read(args[0]), args[1:])


_KNOWN: dict[bytes, Script] = {}  # scripts by text: reading one takes longer than running it


def _read(text: bytes) -> Script:
    if text not in _KNOWN:
        _KNOWN[text] = Script(text.decode())
    return _KNOWN[text]


def _run(store: KeySpace, script: Script, args: list[bytes]) -> Answer:
    count = int(args[0])

    def call(words: list[bytes]) -> Value:
        return _to_lua(store.run(words))

    try:
        return _from_lua(script.run(args[1 : 1 + count], args[1 + count :], call))
    except LuaError as error:
        raise CommandError(f"ERR {error}") from None


def _to_lua(answer: Answer) -> Value:
    if answer is None:
        return False
    if isinstance(answer, Status):
        return Table([answer.text.encode()])
    if isinstance(answer, list):
        return Table([_to_lua(item) for item in answer])
    return answer


def _from_lua(value: object) -> Answer:
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if isinstance(value, Table):
        return [_from_lua(item) for item in value.items()]
    return int(value) if isinstance(value, int | float) else value


# ---- the server ----


@command("TIME")
def _time(store: KeySpace, args: list[bytes]) -> Answer:
    micros = round(store.clock() * 1e6)
    return [b"%d" % (micros // 1_000_000), b"%d" % (micros % 1_000_000)]


@command("INFO")
def _info(store: KeySpace, args: list[bytes]) -> Answer:
    used = sum(_size(key) + _size(value) for key, value in store.values.items())
    return b"# Memory\r\nused_memory:%d\r\nmaxmemory:%d\r\n" % (used, store.max_bytes)


def _size(value: object) -> int:
    if isinstance(value, bytes):
        return len(value) + 50
    if isinstance(value, dict):
        return sum(_size(k) + _size(v) for k, v in value.items())
    return sum(map(_size, value)) if isinstance(value, list) else 8


@command("PING")
def _ping(store: KeySpace, args: list[bytes]) -> Answer:
    return Status("PONG")


@command("SELECT", "CLIENT", "UNWATCH")
def _agree(store: KeySpace, args: list[bytes]) -> Answer:
    return OK


@command("FLUSHALL", "FLUSHDB")
def _flush(store: KeySpace, args: list[bytes]) -> Answer:
    store.flush()
    return OK


# ---- keys ----


@command("DEL")
def _del(store: KeySpace, args: list[bytes]) -> Answer:
    return sum(store.drop(key) for key in args)


@command("EXISTS")
def _exists(store: KeySpace, args: list[bytes]) -> Answer:
    for key in args:
        store.expire_due(key)
    return sum(key in store.values for key in args)


@command("PEXPIRE")
def _pexpire(store: KeySpace, args: list[bytes]) -> Answer:
    return expire(store, args[0], integer(args[1]) / 1000)


@command("EXPIRE")
def _expire(store: KeySpace, args: list[bytes]) -> Answer:
    return expire(store, args[0], float(integer(args[1])))


def expire(store: KeySpace, key: bytes, seconds: float) -> int:
    """Has ``key`` expire in ``seconds``; returns 1, or 0 if it doesn't exist."""
    store.expire_due(key)
    if key not in store.values:
        return 0
    store.expires[key] = store.clock() + seconds
    store.touched(key)
    store.expire_due(key)
    return 1


@command("PTTL")
def _pttl(store: KeySpace, args: list[bytes]) -> Answer:
    store.expire_due(args[0])
    if args[0] not in store.values:
        return -2
    ends = store.expires.get(args[0])
    return -1 if ends is None else max(0, round((ends - store.clock()) * 1000))


# ---- arguments ----


def integer(text: bytes) -> int:
    """Returns the 64-bit integer that ``text`` spells as Redis writes it. Raises CommandError for other text."""
    if not WHOLE.fullmatch(text) or not -(1 << 63) <= int(text) < 1 << 63:
        raise CommandError(NO_INTEGER)
    return int(text)


def bound(text: bytes) -> float:
    """Returns the number that ``text`` spells, which may be infinite. Raises CommandError for other text."""
    if not NUMBER.fullmatch(text):
        raise CommandError("ERR value is not a valid float")
    return float(text)


def pairs(args: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Returns an iterator over ``args`` two by two. Raises CommandError if their number is odd or 0."""
    if not args or len(args) % 2:
        raise CommandError("ERR wrong number of arguments")
    return zip(args[::2], args[1::2], strict=True)


def as_text(number: float) -> bytes:
    """Returns a number as Redis writes it: in the shortest form, whole numbers without a point."""
    return b"%d" % number if number == int(number) and abs(number) < 1e17 else repr(number).encode()
