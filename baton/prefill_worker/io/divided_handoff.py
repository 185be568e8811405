"""A handoff of which each host of the worker's ranks sends its own part of every page, to those hosts of the decode
worker's ranks that read it.

Knows nothing of the engine, or of how a host sends. The lead's host sends its part as ever; the others are told of
each finished block by a stream of gRPC, and send to the same lease and epoch under a shard number of their own. The
decode worker counts a block once all parts of it are verified, and takes the handoff over once all have committed.
So it succeeds as a whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from baton.kv.layout.extents import MOST_RECEIVERS, Part, common, part_bytes, require_part, without
from baton.kv.wire.control import Closing
from baton.prefill_worker.io.handoff import Handoff, HandoffReport
from baton.prefill_worker.io.handoff_frames import Destination
from baton.prefill_worker.io.host_handoff import HostHandoff
from baton.prefill_worker.io.host_orders import HostCommit, HostShip
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import ShipBlock
from baton.protos.errors import BatonError, HandoffRefused, LayoutMismatch, WorkerLost
from baton.protos.nouns import Extent, KvReceiver, TokenRun
from baton.protos.rpc import heed_cancel, settled

CAUSE_S = 2.0  # seconds for a host to say why its stream ended, where the receiver blames another host's end

AnyHandoff = TypeVar("AnyHandoff", Handoff, HostHandoff)
Found = TypeVar("Found")


class OwnHost(NamedTuple):
    """Makes handoffs that send out of the pages of the lead's own host: ``part`` of each, () for all of it.

    ``handoff(to)`` returns one to that destination, ``plan`` says how blocks are converted for the receiver.
    """

    part: Part
    handoff: Callable[[Destination], Handoff]
    plan: Callable[[], Awaitable[WirePlan]]


class FarHost(NamedTuple):
    """Makes handoffs that another host of the worker's ranks sends out of its own pages: ``part`` of each.

    ``handoff(to, part, receivers)`` returns one of the bytes ``part`` to one of ``receivers`` hosts, 0 for one that
    gets everything. ``reaches(address)`` says whether the host can ship to a receiver.
    """

    part: Part
    handoff: Callable[[Destination, Part, int], HostHandoff]
    reaches: Callable[[str], Awaitable[bool]]


class Receivers(NamedTuple):
    """Asks a decode worker how it takes pages: ``hosts(address)`` returns the hosts of its ranks that each take a
    part, () if one takes all; ``takes_parts(address)`` whether that may come in parts.
    """

    hosts: Callable[[str], Awaitable[tuple[KvReceiver, ...]]]
    takes_parts: Callable[[str], Awaitable[bool]]


class DividedHandoff:
    """Sends one request's blocks from all hosts of a worker to all hosts of another; implements what ``Handoff``
    does.

    A stream leads from each sending host to each receiving one that wants some of its bytes of every page.
    The lead's host, which has all of every page, sends converted blocks alone, those for a receiver that doesn't
    take parts, and all where another host can't reach a receiver that wants something of it. ``to`` is the
    receiver's lead.
    """

    def __init__(self, own: OwnHost, hosts: Sequence[FarHost], to: Destination, receivers: Receivers) -> None:
        self._own, self._hosts, self._to, self._receivers = own, hosts, to, receivers
        self._said: list[Callable[[Handoff | HostHandoff], None]] = []  # to each handoff that there will be
        self._far: list[HostHandoff] = []
        self._handoffs: list[Handoff] = []
        self._error: BatonError | None = None
        self._failed = asyncio.Event()

    # ---- what the engine says --------------------------------------------------------------------------

    def ship(self, blocks: Iterable[ShipBlock]) -> None:
        """Queues ``blocks``, as ``Handoff.ship``."""
        self._tell(partial(_ship, tuple(blocks)))

    def commit(self, first: TokenRun, cached_tokens: int, at: float | None = None) -> None:
        """Queues the end of the handoff, as ``Handoff.commit``."""
        self._tell(partial(_commit, Closing(first, cached_tokens), at))

    def fail(self, error: BatonError) -> None:
        """Ends the handoff without a commit, as ``Handoff.fail``; at once where no stream has begun."""
        self._error = self._error or error
        self._failed.set()
        self._tell(partial(_fail, error))

    def _tell(self, act: Callable[[Handoff | HostHandoff], None]) -> None:
        self._said.append(act)
        handoffs: list[Handoff | HostHandoff] = [*self._handoffs, *self._far]
        for handoff in handoffs:
            act(handoff)

    # ---- the streams -----------------------------------------------------------------------------------

    async def run(self) -> HandoffReport:
        """Sends everything, as ``Handoff.run``; returns the lead's report with the bytes of all hosts. Raises
        LayoutMismatch if the receiver's hosts ask for what isn't of its pages, or for less than a page.
        """
        wire, hosts = await self._unless_failed(self._agreed())
        if not hosts and not self._hosts:
            return await self._begun(self._own.handoff(self._to)).run(wire)
        running = list(self._streams(wire, hosts))
        try:
            report = await self._run_all(running)
        except BaseExceptionGroup as failures:
            cause = _cause(failures)
            self._doubt()
            await self._settled()
            heed_cancel()
            raise cause from None
        except asyncio.CancelledError:
            self._doubt()
            await self._settled()
            raise
        size = report.shipped_blocks * wire.unit
        return msgspec.structs.replace(report, shipped_bytes=size, address=self._to.address)

    async def _unless_failed(self, work: Coroutine[object, object, Found]) -> Found:
        """Returns what ``work`` does. Raises the error of ``fail`` if that is called before it is through."""
        tasks = working, failed = asyncio.ensure_future(work), asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None and not working.done():
                raise self._error
            return await working
        finally:
            working.cancel()
            failed.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _agreed(self) -> tuple[WirePlan, tuple[KvReceiver, ...]]:
        """Returns how blocks are sent, and to which hosts, () for one that gets everything; settles who sends."""
        wire = await self._own.plan()
        hosts = await self._receivers.hosts(self._to.address)
        _require_receivers(hosts, wire.unit)
        if not (wire.plain and await self._divides(hosts, wire.unit)):
            self._own, self._hosts = self._own._replace(part=()), ()
        return wire, hosts

    async def _divides(self, hosts: Sequence[KvReceiver], page_bytes: int) -> bool:
        """Returns whether each other host is to send its own part to ``hosts``: the receiver takes parts, and each
        reaches who wants something of it.
        """
        if not self._hosts or not (hosts or await self._receivers.takes_parts(self._to.address)):
            return False
        receivers = self._all_of(hosts, page_bytes)
        addresses = [self._to.address, *(each.address for each in receivers[1:])]
        ways = [
            host.reaches(address)
            for host in self._hosts
            for address, receiver in zip(addresses, receivers, strict=True)
            if common(host.part, receiver.part, page_bytes)
        ]
        return all(await asyncio.gather(*ways))

    def _all_of(self, hosts: Sequence[KvReceiver], page_bytes: int) -> Sequence[KvReceiver]:
        """Returns ``hosts``, or the one that gets everything."""
        return hosts or (KvReceiver(self._to.address, _whole(page_bytes)),)

    def _streams(
        self, wire: WirePlan, hosts: Sequence[KvReceiver]
    ) -> Iterator[Callable[[], Awaitable[HandoffReport]]]:
        """Yields what sends the bytes of each sending host that each of ``hosts`` wants: those of the lead's host
        first.
        """
        far, divided = list[Callable[[], Awaitable[HandoffReport]]](), len(hosts)
        senders = [self._own.part or _whole(wire.unit), *(host.part for host in self._hosts)]
        for at, receiver in enumerate(self._all_of(hosts, wire.unit)):
            to = msgspec.structs.replace(self._to, address=receiver.address) if at else self._to
            parts = [common(part, receiver.part, wire.unit) for part in senders]
            bring = [number for number, part in enumerate(parts) if part]
            for rank, number in enumerate(bring):
                shard = rank, len(bring)
                if number:
                    there = self._begun(self._hosts[number - 1].handoff(to, parts[number], divided))
                    far.append(partial(there.run, shard))
                else:
                    yield partial(self._begun(self._own.handoff(to)).run, wire.to_host(parts[0], shard, divided))
        yield from far

    def _begun(self, handoff: AnyHandoff) -> AnyHandoff:
        """Returns ``handoff``, which has been told what was said before."""
        for act in self._said:
            act(handoff)
        if isinstance(handoff, Handoff):
            self._handoffs.append(handoff)
        else:
            self._far.append(handoff)
        return handoff

    async def _run_all(self, running: Sequence[Callable[[], Awaitable[HandoffReport]]]) -> HandoffReport:
        """Runs all handoffs; returns the report of the first, once all from the lead's host are taken over."""
        count = len(self._handoffs)
        async with asyncio.TaskGroup() as group:
            tasks = list[asyncio.Task[HandoffReport]]()
            tasks += [group.create_task(self._run(run, tasks)) for run in running]
            reports = [await task for task in tasks[:count]]
            for other in tasks[count:]:  # everything is there: why a host ends now is of no interest
                other.cancel()
            await settled(tasks[count:])
        busy, exposed = max(each.busy_s for each in reports), max(each.exposed_s for each in reports)
        return msgspec.structs.replace(reports[0], busy_s=busy, exposed_s=exposed)

    async def _run(
        self, run: Callable[[], Awaitable[HandoffReport]], tasks: Sequence[asyncio.Task[HandoffReport]]
    ) -> HandoffReport:
        try:
            return await run()
        except HandoffRefused as error:
            if error.param == "shard_rank":  # another stream has ended: whoever ended it knows why
                others = [task for task in tasks if task is not asyncio.current_task()]
                if others:
                    await asyncio.wait(others, timeout=CAUSE_S, return_when=asyncio.FIRST_EXCEPTION)
            raise

    def _doubt(self) -> None:
        for host in self._far:
            host.doubt()

    async def _settled(self) -> None:
        for host in self._far:
            await host.settled()


def _require_receivers(hosts: Sequence[KvReceiver], page_bytes: int) -> None:
    """Raises LayoutMismatch unless ``hosts``, which a peer has described, each want a part of a page, and together
    all of it. There may be none.
    """
    if len(hosts) > MOST_RECEIVERS:
        raise LayoutMismatch(
            f"the decode worker says that {len(hosts)} hosts receive its KV; {MOST_RECEIVERS} may", "receivers"
        )
    for host in hosts:
        require_part(host.part, page_bytes)
    if hosts and (left := without(_whole(page_bytes), tuple(host.part for host in hosts), page_bytes)):
        text = f"the decode worker's hosts ask for none of {part_bytes(left)} bytes of each page; together they"
        raise LayoutMismatch(f"{text} must ask for all {page_bytes}: start it again on one build", "receivers")


def _whole(page_bytes: int) -> Part:
    return (Extent(0, page_bytes, 0, 1),)


def _ship(blocks: tuple[ShipBlock, ...], handoff: Handoff | HostHandoff) -> None:
    if isinstance(handoff, Handoff):
        handoff.ship(blocks)
    else:
        handoff.put(HostShip(blocks))


def _commit(closing: Closing, at: float | None, handoff: Handoff | HostHandoff) -> None:
    if isinstance(handoff, Handoff):
        handoff.commit(closing.first, closing.cached_tokens, at)
    else:
        handoff.put(HostCommit(closing))


def _fail(error: BatonError, handoff: Handoff | HostHandoff) -> None:
    if isinstance(handoff, Handoff):
        handoff.fail(error)
    elif isinstance(error, WorkerLost):
        handoff.give_up()


def _cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the failure that caused the others: one that doesn't blame another host's stream, if there is one."""
    found = list[BaseException]()
    for error in failures.exceptions:
        found.append(_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    blames = [isinstance(error, HandoffRefused) and error.param == "shard_rank" for error in found]
    return next((error for error, blamed in zip(found, blames, strict=True) if not blamed), found[0])
