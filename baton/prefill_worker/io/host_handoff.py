"""A handoff of which each host of the worker's ranks sends its own part of every page.

Knows nothing of the engine, or of how a host sends. The lead's host sends its part as ever; the others are told of
each finished block by a stream of gRPC, and send to the same lease and epoch under a shard number of their own. The
decode worker counts a block once all parts of it are verified, and takes the handoff over once all have committed.
So it succeeds as a whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

import grpc
import grpc.aio
import msgspec

from baton.kv.layout.extents import Part
from baton.kv.wire.control import Closing
from baton.prefill_worker.io.handoff import Handoff, HandoffReport
from baton.prefill_worker.io.host_orders import (
    ANSWERS,
    METHOD,
    Answer,
    HostBegin,
    HostCommit,
    HostNotSent,
    HostShip,
    HostStop,
    Order,
    encode,
)
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import ShipBlock
from baton.protos.errors import BatonError, HandoffRefused, WorkerLost, from_info
from baton.protos.nouns import TokenRun
from baton.protos.rpc import heed_cancel, settled

# Seconds for a host to confirm that it reads no page any more; a silent one ends the worker by then.
CONFIRM_S = 15.0

CAUSE_S = 2.0  # seconds for a host to say why its stream ended, where the receiver blames another host's end


class HostHandoff:
    """Has the KV sender of another host, behind ``channel``, send its part of one handoff, which ``begin`` says."""

    def __init__(self, channel: grpc.aio.Channel, begin: HostBegin) -> None:
        self._channel, self._begin = channel, begin
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._over = asyncio.Event()
        self._lost_at: float | None = None  # by the loop's clock; None unless the host may read pages unheard

    def put(self, order: Order) -> None:
        """Passes ``order`` on, after earlier ones."""
        self._orders.put_nowait(order)

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
            raise
        finally:
            orders.cancel()
            answer.cancel()
            call.cancel()
            await asyncio.gather(orders, answer, return_exceptions=True)
        if isinstance(found, HostNotSent):
            raise from_info(found.error)
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


class DividedHandoff:
    """Sends one request's blocks from all hosts of a worker; implements what ``Handoff`` does.

    ``own`` is the handoff of the lead's host, ``part`` what it sends of a page if ``hosts`` send the rest. ``plan``
    says how blocks are converted for the receiver; converted blocks, and those for a receiver that doesn't take
    parts (``takes_parts``), are sent by the lead's host alone, which has all of every page.
    """

    def __init__(
        self,
        own: Handoff,
        part: Part,
        hosts: Sequence[HostHandoff],
        plan: Callable[[], Awaitable[WirePlan]],
        takes_parts: Callable[[], Awaitable[bool]],
    ) -> None:
        self._own, self._part, self._hosts = own, part, hosts
        self._plan, self._takes_parts = plan, takes_parts

    def ship(self, blocks: Iterable[ShipBlock]) -> None:
        """Queues ``blocks``, as ``Handoff.ship``."""
        held = tuple(blocks)
        self._own.ship(held)
        self._tell(HostShip(held))

    def commit(self, first: TokenRun, cached_tokens: int, at: float | None = None) -> None:
        """Queues the end of the handoff, as ``Handoff.commit``."""
        self._own.commit(first, cached_tokens, at)
        self._tell(HostCommit(Closing(first, cached_tokens)))

    def fail(self, error: BatonError) -> None:
        """Ends the handoff without a commit, as ``Handoff.fail``."""
        self._own.fail(error)
        if isinstance(error, WorkerLost):
            for host in self._hosts:
                host.give_up()

    async def run(self) -> HandoffReport:
        """Sends everything, as ``Handoff.run``; returns the lead's report with the bytes of all hosts."""
        wire = await self._plan()
        if not wire.plain or not await self._takes_parts():
            return await self._own.run(wire)
        whole, count = wire.unit, 1 + len(self._hosts)
        wire = msgspec.structs.replace(wire, part=self._part, shard=(0, count))
        try:
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(host.run((at, count))) for at, host in enumerate(self._hosts, 1)]
                report = await self._run_own(wire, others)
                for other in others:  # everything is there: why a host ends now is of no interest
                    other.cancel()
                await settled(others)
        except BaseExceptionGroup as failures:
            cause = _cause(failures)
            await self._settled()
            heed_cancel()
            raise cause from None
        except asyncio.CancelledError:
            await self._settled()
            raise
        return msgspec.structs.replace(report, shipped_bytes=report.shipped_blocks * whole)

    async def _run_own(self, wire: WirePlan, others: Sequence[asyncio.Task[HandoffReport]]) -> HandoffReport:
        try:
            return await self._own.run(wire)
        except HandoffRefused as error:
            if error.param == "shard_rank":  # another host's stream has ended: that host knows why
                await asyncio.wait(others, timeout=CAUSE_S, return_when=asyncio.FIRST_EXCEPTION)
            raise

    async def _settled(self) -> None:
        for host in self._hosts:
            await host.settled()

    def _tell(self, order: Order) -> None:
        for host in self._hosts:
            host.put(order)


def _cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the failure that caused the others: one that doesn't blame another host's stream, if there is one."""
    found = list[BaseException]()
    for error in failures.exceptions:
        found.append(_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    blames = [isinstance(error, HandoffRefused) and error.param == "shard_rank" for error in found]
    return next((error for error, blamed in zip(found, blames, strict=True) if not blamed), found[0])
