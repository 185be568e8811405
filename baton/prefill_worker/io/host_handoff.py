"""A part of a handoff that another host of the worker's ranks sends, as the lead's host sees it.

Knows nothing of the engine, of what a page holds, or of how the host sends: it is told of each finished block by a
stream of gRPC (``host_orders.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc
import grpc.aio
import msgspec

from baton.prefill_worker.io.handoff import HandoffReport
from baton.prefill_worker.io.host_orders import (
    ANSWERS,
    METHOD,
    Answer,
    HostBegin,
    HostCommit,
    HostNotSent,
    HostStop,
    Order,
    encode,
)
from baton.protos.errors import HandoffRefused, WorkerLost, from_info

# Seconds for a host to confirm that it reads no page any more; a silent one ends the worker by then.
CONFIRM_S = 15.0


class HostHandoff:
    """Has the KV sender of another host, behind ``channel``, send its part of one handoff, which ``begin`` says.

    ``failed`` is called if the way from that host to the decode worker may not work.
    """

    def __init__(
        self, channel: grpc.aio.Channel, begin: HostBegin, failed: Callable[[], None] = lambda: None
    ) -> None:
        self._channel, self._begin, self._failed = channel, begin, failed
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._over = asyncio.Event()
        self._due = False  # whether everything was said, and the host hasn't answered
        self._lost_at: float | None = None  # by the loop's clock; None unless the host may read pages unheard

    def put(self, order: Order) -> None:
        """Passes ``order`` on, after earlier ones."""
        self._orders.put_nowait(order)
        self._due = isinstance(order, HostCommit) or self._due

    def doubt(self) -> None:
        """Counts the way to the decode worker as failed if the host was told of the commit and hadn't answered when
        the handoff ended: it may stand still.
        """
        if self._due:
            self._failed()

    def give_up(self) -> None:
        """Lets ``run`` end without the host's confirmation, because the worker's pages end with its engine."""
        self._over.set()

    async def run(self, shard: tuple[int, int]) -> HandoffReport:
        """Returns the host's report once the decode worker has taken its part over, under the number ``shard``.

        Raises the decode worker's refusal, and WorkerLost if the host is gone. However it ends (cancellation
        included), the host reads no page any more after ``settled``.
        """
        call = self._channel.stream_stream(METHOD)()
        answer = asyncio.ensure_future(self._answer(call))
        orders = asyncio.ensure_future(self._pass_on(call, shard))
        self._lost_at = None
        try:
            found = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self.put(HostStop())
            await self._confirmed(answer)
            raise
        except WorkerLost:
            self._lost_at = asyncio.get_running_loop().time()
            self._failed()
            raise
        finally:
            orders.cancel()
            answer.cancel()
            call.cancel()
            await asyncio.gather(orders, answer, return_exceptions=True)
        self._due = False
        if isinstance(found, HostNotSent):
            error = from_info(found.error)
            if isinstance(error, WorkerLost) or (type(error) is HandoffRefused and error.param != "shard_rank"):
                self._failed()  # all else is said by a receiver that was reached
            raise error
        return found.report

    async def settled(self) -> None:
        """Waits, if ``run`` lost the host, until it reads no page any more: ``give_up``, or CONFIRM_S seconds.

        A cancellation doesn't end the wait: ``heed_cancel`` tells of it.
        """
        loop = asyncio.get_running_loop()
        while self._lost_at is not None and (left := self._lost_at + CONFIRM_S - loop.time()) > 0:
            with suppress(asyncio.CancelledError, TimeoutError):
                async with asyncio.timeout(left):
                    await self._over.wait()
                self._lost_at = None

    async def _confirmed(self, answer: asyncio.Future[Answer]) -> None:
        """Waits for the host's answer, after which it reads no page any more, for up to CONFIRM_S seconds and
        whoever is cancelled meanwhile. Without one the host counts as lost when the wait began.
        """
        loop = asyncio.get_running_loop()
        self._lost_at = loop.time()
        over = asyncio.ensure_future(self._over.wait())
        try:
            while not (answer.done() or over.done()) and (left := self._lost_at + CONFIRM_S - loop.time()) > 0:
                with suppress(asyncio.CancelledError):  # it is on its way already
                    await asyncio.wait((answer, over), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self._lost_at = None

    async def _pass_on(self, call: grpc.aio.StreamStreamCall[bytes, bytes], shard: tuple[int, int]) -> None:
        order: Order = msgspec.structs.replace(self._begin, shard=shard)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # ``_answer`` hears why
            while True:
                await call.write(encode(order))
                order = await self._orders.get()

    async def _answer(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> Answer:
        address = self._begin.to.address
        try:
            found = await call.read()
        except grpc.aio.AioRpcError as error:
            text = f"the KV sender of another host of this worker's ranks is gone: {error.details()}"
            raise WorkerLost(text, "rank_hosts") from None
        if found is None or found is grpc.aio.EOF:
            raise WorkerLost(f"another host of this worker's ranks sends nothing to {address}", "rank_hosts")
        return ANSWERS.decode(found)
