"""A Redis server in the simulated network, and the connection class by which redis-py reaches it.

It speaks RESP 2, under redis-py's own client, pool and parser. The server answers each connection in order; it can
be made to stall, to lose its data or the latest of it, or to stop. Knows nothing of what is stored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from redis.asyncio.connection import AbstractConnection

import baton.drill.redis.commands  # noqa: F401  # registers the commands
from baton.drill.loop import RESOLUTION_S, seeded_loop
from baton.drill.machines.network import Network, NetworkConnection
from baton.drill.redis.store import COMMANDS, OK, Answer, CommandError, KeySpace, Status

ADDRESS = "redis:6379"
PROCESS = "redis"
URL = "redis://redis:6379/0?protocol=2"
AT_ONCE = (b"MULTI", b"WATCH")  # commands that a transaction refuses
ABORTED = "EXECABORT Transaction discarded because of previous errors."


class SimulatedRedis:
    """A Redis server in the network. ``epoch`` is added to the loop's time for its wall clock, in Unix seconds."""

    def __init__(self, network: Network, epoch: float) -> None:
        self._network, self.epoch = network, epoch
        self._loop = seeded_loop()
        self.store = KeySpace(self.wall_clock)
        self.stalled_until = 0.0
        self._held: deque[Callable[[], None]] = deque()
        self.listen()

    def wall_clock(self) -> float:
        """Returns the server's wall-clock time, in Unix seconds."""
        return self._loop.true_time() + self.epoch

    def listen(self) -> None:
        """Accepts connections at ADDRESS from now on."""
        self._network.listen(ADDRESS, PROCESS, self)

    def stall(self, seconds: float) -> None:
        """Answers no command for ``seconds``; commands that come meanwhile are answered afterwards."""
        self.stalled_until = max(self.stalled_until, self._loop.true_time() + seconds)
        self._loop.call_at_true(self._loop.true_time() + seconds, self._go_on)

    def stop(self) -> None:
        """Ends the server: its connections break, and commands that it held are lost. The data stay."""
        self._network.process_died(PROCESS)
        self._held.clear()

    def start_empty(self) -> None:
        """Starts the server again, without data and scripts."""
        self.store = KeySpace(self.wall_clock)
        self.listen()

    def execute(self, work: Callable[[], None]) -> None:
        """Calls ``work`` now, or once the server no longer stalls."""
        if self._loop.true_time() < self.stalled_until or self._held:
            self._held.append(work)
        else:
            work()

    def _go_on(self) -> None:
        while self._held and self._loop.true_time() >= self.stalled_until - RESOLUTION_S:
            self._held.popleft()()


class Session:
    """The server's side of one connection: the commands queued since MULTI, and the keys that it watches."""

    def __init__(self, server: SimulatedRedis) -> None:
        self._server = server
        self._buffer = b""
        self._queued: list[list[bytes]] | None = None
        self._watched: dict[bytes, int] = {}
        self._spoilt = False  # whether a command that was to be queued was refused

    def feed(self, data: bytes) -> bytes:
        """Takes received bytes; returns the encoded answers to the commands that they complete."""
        self._buffer += data
        answers = []
        while (read := _command(self._buffer)) is not None:
            words, self._buffer = read
            answers.append(self._answer(words))
        return b"".join(answers)

    def _answer(self, words: list[bytes]) -> bytes:
        try:
            return encoded(self._run(words))
        except CommandError as error:
            return f"-{error}\r\n".encode()

    def _run(self, words: list[bytes]) -> Answer:
        name, store = words[0].upper(), self._server.store
        if self._queued is None:
            return self._alone(name, words, store)
        if name == b"EXEC":
            return self._exec(store)
        if name == b"DISCARD":
            self._forget()
            return OK
        return self._queue(name, words)

    def _alone(self, name: bytes, words: list[bytes], store: KeySpace) -> Answer:
        """Runs a command outside a transaction."""
        if name in (b"EXEC", b"DISCARD"):
            raise CommandError(f"ERR {name.decode()} without MULTI")
        if name == b"MULTI":
            self._queued = []
        elif name == b"UNWATCH":
            self._watched = {}
        elif name == b"WATCH":
            for key in words[1:]:
                store.expire_due(key)
                self._watched[key] = store.versions.get(key, 0)
        else:
            return store.run(words)
        return OK

    def _queue(self, name: bytes, words: list[bytes]) -> Answer:
        """Queues a command for EXEC; a command that is refused makes EXEC fail."""
        if name in AT_ONCE or name not in COMMANDS:
            self._spoilt = True
            raise CommandError(f"ERR {name.decode(errors='replace')} is not allowed in a transaction")
        self._queued = [*(self._queued or []), words]
        return Status("QUEUED")

    def _forget(self) -> None:
        self._queued, self._watched, self._spoilt = None, {}, False

    def _exec(self, store: KeySpace) -> Answer:
        queued, watched, spoilt = self._queued or [], self._watched, self._spoilt
        self._forget()
        if spoilt:
            raise CommandError(ABORTED)
        for key in watched:
            store.expire_due(key)
        if any(store.versions.get(key, 0) != version for key, version in watched.items()):
            return None
        return [_each(store, words) for words in queued]


def _each(store: KeySpace, words: list[bytes]) -> Answer:
    try:
        return store.run(words)
    except CommandError as error:  # one command's failure doesn't undo the others
        return error


def _command(data: bytes) -> tuple[list[bytes], bytes] | None:
    """Returns the first command of ``data``, as words, and the remaining bytes; None while it is incomplete."""
    end = data.find(b"\r\n")
    if end < 0:
        return None
    words, at = [], end + 2
    for _ in range(int(data[1:end])):
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        begin = end + 2
        at = begin + int(data[at + 1 : end]) + 2
        if len(data) < at:
            return None
        words.append(data[begin : at - 2])
    return words, data[at:]


def encoded(answer: Answer) -> bytes:
    """Returns ``answer`` encoded as RESP 2."""
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, bytes):
        return b"$%d\r\n%b\r\n" % (len(answer), answer)
    if isinstance(answer, Status):
        return f"+{answer.text}\r\n".encode()
    if isinstance(answer, CommandError):
        return f"-{answer}\r\n".encode()
    return b"*%d\r\n" % len(answer) + b"".join(encoded(item) for item in answer)


T = TypeVar("T")


class _Writer:
    """The stream writer of a connection's client end, as redis-py uses it."""

    def __init__(self, connection: NetworkConnection, reader: asyncio.StreamReader) -> None:
        self._connection, self._reader = connection, reader
        server = connection.listener
        assert isinstance(server, SimulatedRedis)
        self._server, self._session = server, Session(server)
        connection.when_broken(self._broke, connection.client)

    def writelines(self, parts: Iterable[bytes]) -> None:
        """Sends bytes to the server, which are lost if the connection breaks."""
        data = b"".join(parts)
        if not self._connection.broken:
            self._connection.up.send(
                lambda: self._server.execute(lambda: self._arrived(data)),
                len(data),
                lambda count: self._server.execute(lambda: self._arrived(data[:count])),
            )

    def write(self, data: bytes) -> None:
        """Sends bytes to the server, which are lost if the connection breaks."""
        self.writelines([data])

    async def drain(self) -> None:
        """Raises ConnectionResetError if the connection has broken."""
        await asyncio.sleep(0)
        if self._connection.broken:
            raise ConnectionResetError("the connection broke")

    def close(self) -> None:
        """Breaks the simulated connection to Redis, at both ends."""
        self._connection.break_now()

    async def wait_closed(self) -> None:
        """Returns immediately, because a simulated connection closes within ``close``."""

    @property
    def transport(self) -> _Writer:
        """Returns itself: it is its own transport."""
        return self

    def get_write_buffer_size(self) -> int:
        """Returns 0, because the simulated network takes everything at once."""
        return 0

    def get_extra_info(self, name: str, default: T | None = None) -> T | None:
        """Returns ``default``, because there is no socket."""
        return default

    def _arrived(self, data: bytes) -> None:
        if not self._connection.broken:
            answer, read = self._session.feed(data), self._reader.feed_data
            self._connection.down.send(
                lambda: read(answer), len(answer), lambda count: read(answer[:count]) if count else None
            )

    def _broke(self) -> None:
        self._reader.feed_eof()


def connections(network: Network, process: str) -> type[AbstractConnection]:
    """Returns the redis-py connection class by which process ``process`` reaches the simulated Redis over
    ``network``.
    """

    class SimulatedConnection(AbstractConnection):
        """A connection of redis-py over the simulated network."""

        def __init__(self, *, host: str = "", port: int = 0, **options: Any) -> None:
            self.host, self.port = host, port
            super().__init__(**{"driver_info": None} | options)  # looking for its version reads files each time

        def repr_pieces(self) -> list[tuple[str, object]]:
            """Returns the parts of the connection's name in errors."""
            return [("process", process)]

        def _connection_arguments(self) -> dict[str, object]:
            return {}

        def _host_error(self) -> str:
            return ADDRESS

        async def _connect(self) -> None:
            await asyncio.sleep(2 * network.conditions.delay_s)
            found = network.connect(process, ADDRESS)
            if found is None:
                raise ConnectionRefusedError(f"nobody answers at {ADDRESS}")
            reader = asyncio.StreamReader()
            self._reader, self._writer = reader, _Writer(found, reader)  # type: ignore[assignment]

    return SimulatedConnection
