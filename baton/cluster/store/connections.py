"""Connections to Redis, and the pool that shares them: callers wait in turn for one, cancellations are heeded, and
a server that has become a replica is left.

Knows nothing of what is asked over them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property

from redis.asyncio import ConnectionPool, SSLConnection
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import MaxConnectionsError, ReadOnlyError

MOST = 32  # connections of a process, because a burst of requests may not take all that the server has
TURN_S = 2.0  # seconds that a caller waits for one of them


class WaitingPool(ConnectionPool):
    """Hands out connections; where ``max_connections`` are in use, callers wait in turn for at most TURN_S seconds.

    redis-py's own pool fails such a call at once, as if the server were away.
    """

    @cached_property
    def _waiting(self) -> deque[asyncio.Future[None]]:
        return deque()

    async def get_connection(
        self, command_name: object = None, *keys: object, **options: object
    ) -> AbstractConnection:
        """Returns a connected connection. Raises MaxConnectionsError after TURN_S seconds without one."""
        until = asyncio.get_running_loop().time() + TURN_S
        if self._waiting:
            await self._turn(until, self._waiting.append)
        while True:
            try:
                return await super().get_connection()
            except MaxConnectionsError:  # a newcomer may have overtaken it: it keeps its place
                await self._turn(until, self._waiting.appendleft)

    async def release(self, connection: AbstractConnection) -> None:
        """Takes a connection back and lets the next caller have it; closes all idle ones if it met a replica."""
        try:
            await super().release(connection)
            if isinstance(connection, CancellableConnection) and connection.met_replica:
                connection.met_replica = False
                for idle in list(self._available_connections):
                    await idle.disconnect(nowait=True)
        finally:
            self._call_next()

    async def _turn(self, until: float, stand: Callable[[asyncio.Future[None]], None]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stand(turn)
        try:
            async with asyncio.timeout_at(until):
                await turn
        except BaseException as error:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled():  # called just as it gave up
                self._call_next()
            if isinstance(error, TimeoutError):
                raise MaxConnectionsError(f"all {self.max_connections} connections are in use") from None
            raise

    def _call_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class CancellableConnection(AbstractConnection):
    """A connection whose caller gets each cancellation, and which is closed when it turns out to lead to a replica:
    the server's address may lead to its successor by now.

    redis-py writes through ``asyncio.wait_for``, which until Python 3.12 returns as if nothing had been when a
    cancellation comes in the turn in which the write ends: the caller would go on with work that nobody wants.
    """

    met_replica = False  # since the pool handed it out

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """Writes at once, without a task of its own, where the connection is idle; raises a cancellation that came
        meanwhile.

        Whether the server reads it is seen by how long its answer takes.
        """
        writer, due = self._writer, check_health and self.health_check_interval
        if self.is_connected and not due and writer and not writer.transport.get_write_buffer_size():
            writer.writelines(_parts(command))
            return
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        await super().send_packed_command(command, check_health)
        if task is not None and task.cancelling() > before:
            await self.disconnect(nowait=True)  # an answer is on its way that nobody will read
            raise asyncio.CancelledError

    async def read_response(
        self,
        disable_decoding: bool = False,
        timeout: float | None = None,
        *,
        disconnect_on_error: bool = True,
        push_request: bool | None = False,
    ) -> object:
        """Reads the answer to the last command; closes the connection to a server that has become a replica."""
        try:
            return await super().read_response(
                disable_decoding, timeout, disconnect_on_error=disconnect_on_error, push_request=push_request
            )
        except ReadOnlyError:
            self.met_replica = True
            await self.disconnect(nowait=True)
            raise


class ReloadingConnection(SSLConnection):
    """Reads its certificates again whenever it connects: they may have been renewed."""

    async def connect(self) -> None:
        """Connects as before, with what the files hold now."""
        self.ssl_context.context = None
        await super().connect()


def _parts(command: bytes | str | Iterable[bytes]) -> Iterable[bytes]:
    command = command.encode() if isinstance(command, str) else command
    return (command,) if isinstance(command, bytes) else command
