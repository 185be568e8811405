"""The connection to the KV receiver of another host of a decode worker's ranks.

Knows nothing of leases' contents. A host that ends its connection, or answers no order for ``SILENT_S`` seconds, is
lost, and the worker with it: nobody could say any more who writes its pages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc.aio
import msgspec

from baton.decode_worker.io.host_intake import Said
from baton.decode_worker.io.receiver_orders import (
    METHOD,
    REPORTS,
    BeginReceiving,
    NotReceiving,
    Order,
    OrderDone,
    Ping,
    Receiving,
    Report,
    encode,
)
from baton.kv.layout.extents import Part
from baton.kv.transport.grpc import CHANNEL_OPTIONS
from baton.protos.channel import HostSender
from baton.protos.errors import StartupError
from baton.protos.nouns import KvReceiver, WorkerInfo
from baton.tls.rpc import Dialer

BEGIN_S = 8.0  # seconds for a host to take its first order, as its process runs already; within those of a start
PING_S = 5.0  # seconds without an order after which a sign of life is asked for
SILENT_S = 15.0  # seconds without an answer after which a host counts as lost, as between ranks


class HostReceiver:
    """Passes orders to the KV receiver that ``host`` describes, and its reports back (``OtherHost``)."""

    def __init__(self, host: HostSender, dialer: Dialer) -> None:
        self.address, self.part, self.name = host.address, host.part, host.name or host.address
        self._token, self._dialer = host.token, dialer
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._sent = self._done = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._report: Callable[[Said], None] = lambda said: None
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None

    # ---- what the intake uses ----

    def send(self, order: Order) -> None:
        """Queues ``order`` after earlier ones."""
        self._sent += 1
        self._orders.put_nowait(order)

    def when_done(self, then: Callable[[], None]) -> None:
        """Calls ``then`` once the host acts by all orders so far; at once if it does already."""
        if self._done == self._sent:
            then()
        else:
            self._waiting.append((self._sent, then))

    def hear(self, report: Callable[[Said], None]) -> None:
        """Has ``report`` called with what the host's streams do, in order."""
        self._report = report

    # ---- the connection ----

    async def open(self, info: WorkerInfo, hosts: int) -> None:
        """Connects, for the worker that ``info`` describes. Raises StartupError."""
        self._channel = self._dialer.channel(self.address, options=CHANNEL_OPTIONS)
        self._call = self._channel.stream_stream(METHOD)()
        try:
            async with asyncio.timeout(BEGIN_S):
                await self._call.write(encode(BeginReceiving(self._token, info, self.part, hosts)))
                said = await self._read()
        except TimeoutError:
            raise self._failed(f"doesn't answer within {BEGIN_S:.0f} s") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, ConnectionError) as error:
            raise self._failed(f"doesn't answer: {error}") from None
        if isinstance(said, NotReceiving):
            raise self._failed(f"receives nothing for it: {said.error.message}")

    def _failed(self, how: str) -> StartupError:
        text = f"the KV receiver at {self.address}, another host of this worker's ranks, {how}"
        return StartupError(text, "worker.rank_hosts")

    async def run(self) -> str:
        """Passes orders and reports on until the host is lost; returns why."""
        tasks = [asyncio.create_task(each) for each in (self._pass_on(), self._hear_all(), self._watch())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        why = [str(each) for each in found if each is not None and not isinstance(each, asyncio.CancelledError)]
        return f"the KV receiver at {self.address} is lost: {why[0] if why else 'it has ended the connection'}"

    async def close(self) -> None:
        """Ends the connection, if there is one; the host ends all streams that it has for this worker."""
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def _read(self) -> Report:
        assert self._call is not None, "open it first"
        said = await self._call.read()
        if said is None or said is grpc.aio.EOF:
            raise ConnectionError("it has ended the connection")
        try:
            return REPORTS.decode(said)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"it says what can't be read ({error}); is it of the same version?") from None

    async def _pass_on(self) -> None:
        assert self._call is not None, "open it first"
        while True:
            await self._call.write(encode(await self._orders.get()))

    async def _hear_all(self) -> None:
        while True:
            said = await self._read()
            if isinstance(said, OrderDone):
                self._take_done()
            elif not isinstance(said, Receiving | NotReceiving):
                self._report(said)

    def _take_done(self) -> None:
        self._done += 1
        while self._waiting and self._waiting[0][0] <= self._done:
            self._waiting.popleft()[1]()

    async def _watch(self) -> None:
        """Raises ConnectionError once an order has waited while the host answered none for ``SILENT_S`` seconds.

        They are counted in turns of ``PING_S``, between which answers are read: a standstill of this process itself
        is one turn, however long.
        """
        silent_s, done = 0.0, self._done
        while True:
            if self._done == self._sent:
                self.send(Ping())
            await asyncio.sleep(PING_S)
            silent_s, done = silent_s + PING_S if self._done == done else 0.0, self._done
            if silent_s >= SILENT_S:
                raise ConnectionError(f"it has answered no order for {SILENT_S:.0f} s")


class HostReceivers:
    """Is all other hosts that receive parts of a worker's pages: the first of ``hosts`` is the lead's own."""

    def __init__(self, hosts: Sequence[HostSender], dialer: Dialer) -> None:
        self.part: Part = hosts[0].part
        self.others = [HostReceiver(host, dialer) for host in hosts[1:]]

    async def open(self, info: WorkerInfo) -> tuple[KvReceiver, ...]:
        """Connects to all for the worker that ``info`` describes, side by side; returns what Describe tells of the
        hosts. Raises StartupError, for the first one that fails.
        """
        opening = (host.open(info, 1 + len(self.others)) for host in self.others)
        failures = [each for each in await asyncio.gather(*opening, return_exceptions=True) if each is not None]
        if failures:
            raise failures[0]
        far = (KvReceiver(host.address, host.part) for host in self.others)
        return KvReceiver(info.address, self.part), *far

    async def run(self) -> str:
        """Passes orders and reports on until a host is lost; returns which, and why."""
        running = [asyncio.create_task(host.run()) for host in self.others]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def close(self) -> None:
        """Ends the connections to all hosts."""
        for host in self.others:
            with suppress(grpc.aio.AioRpcError):
                await host.close()
