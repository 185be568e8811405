"""Finds the best working transport to each decode worker: measures before the first use and after a failure.

Knows nothing of handoffs. It never falls back silently: ``report`` gets a KvLink with the reason, and the log a
warning. Of the transports that work the most preferred is taken, unless one is much faster. A pair that fell back
is measured again from time to time, so that one noisy preflight doesn't decide permanently.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from baton.kv import transport as transports
from baton.kv.layout.extents import MOST_RECEIVERS
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import by_card, preflight
from baton.kv.wire.base import HandoffStream, Transport, WatchedStream
from baton.kv.wire.describing import ask_worker, this_host
from baton.kv.wire.preflight import LinkSpeed
from baton.kv.wire.verdict import TransportVerdict, no_way, pick
from baton.protos.errors import BatonError
from baton.protos.measurements import KvLink
from baton.protos.nouns import KvLayout, KvReceiver, WorkerInfo
from baton.tls.identity import Identity
from baton.tls.rpc import Dialer

log = logging.getLogger("baton.kv")

AUTO = "auto"
PREFERRED_ON_ONE_HOST = ("shm", "tcp", "grpc")
OTHER_HOST = ("tcp", "grpc")
AGAIN_S = (30.0, 1800.0)  # seconds, least and most, until a fallback is measured again; the pause doubles each time
CONFIRM = 2  # measurements in a row that have to agree before a route is changed
KEPT_ROUTES = 1024  # routes kept, because workers come and go, each with an address of its own

Describe = Callable[[str], Awaitable[WorkerInfo]]
Report = Callable[[KvLink, str], None]


class PairRoute(msgspec.Struct, frozen=True):
    """The transport and address by which one decode worker is reached.

    ``fell_back`` says that a preferred transport failed or was slower.
    """

    transport: Transport
    address: str
    info: WorkerInfo
    name: str  # of the transport
    fell_back: bool


class _Again(msgspec.Struct):
    """The time at which a pair that fell back is measured next, and the pause after that, in seconds."""

    at: float
    pause: float


class _Replaced(Exception):
    """Ends a choice of the transport to a process in whose place another one serves by now."""


class AutoTransport:
    """Implements ``Transport`` by the best transport to each worker, found by measuring.

    ``wanted`` is "auto", or the only transport to use: if it doesn't work, a handoff fails. ``sender(name,
    memory)`` makes a transport. ``report(link, reason)`` is called with each result; ``reason`` is "",
    "not_offered", "failed" or "slower".
    """

    def __init__(
        self,
        memory: PageMemory,
        clock: Callable[[], float],
        wanted: str = AUTO,
        report: Report = lambda link, reason: None,
        describe: Describe | None = None,
        host_id: str | None = None,
        identity: Identity | None = None,
        sender: Callable[[str, PageMemory], Transport] | None = None,
    ) -> None:
        self._memory = memory
        self._clock = clock
        self._wanted = wanted
        self._report = report
        self._describe = describe or partial(ask_worker, dialer=Dialer(identity))
        self._sender = sender or partial(transports.sender, identity=identity)
        self._host_id = this_host() if host_id is None else host_id
        self._transports: dict[str, Transport] = {}
        self._asked: dict[str, asyncio.Future[WorkerInfo]] = {}  # what each says of itself, before it is measured
        self._routes: dict[str, asyncio.Future[PairRoute]] = {}
        self._running: set[asyncio.Future[WorkerInfo] | asyncio.Future[PairRoute]] = set()  # forgotten ones, too
        self._again: dict[str, _Again] = {}
        self._unreached: dict[str, float] = {}  # until when hosts of ranks aren't asked again
        self._described: dict[str, WorkerInfo] = {}  # by address; kept when a route is lost, to name who failed

    async def connect(self, address: str) -> HandoffStream:
        """Returns a new stream to the worker at ``address``, by the best transport, which is measured first if it
        isn't known.

        If an earlier choice fails now, the choice is made again, once. Raises WorkerLost if no transport works and
        HandoffRefused if the worker doesn't offer the wanted one.
        """
        if address in self._routes:
            with suppress(BatonError):
                return await self._connect(address)
        return await self._connect(address)

    async def _connect(self, address: str) -> HandoffStream:
        choosing, route = await self._route(address)
        try:
            stream = await route.transport.connect(route.address)
        except Exception:  # whatever it is: a choice that failed must not be the choice of whoever comes next
            self._forget(address, choosing)
            raise
        return WatchedStream(stream, lambda: self._forget(address, choosing))

    async def meet(self, address: str, incarnation: str) -> None:
        """Chooses the transport to process ``incarnation`` of the worker at ``address``, unless it is known.

        After a fallback it measures again at growing intervals; handoffs meanwhile use the current choice. Raises
        WorkerLost and HandoffRefused as ``connect`` does.
        """
        self.expect(address, incarnation)
        choosing, route = await self._route(address)
        if route.fell_back and self._is_due(address):
            await self._look_again(address, choosing, route)

    async def _route(self, address: str) -> tuple[asyncio.Future[PairRoute], PairRoute]:
        """Waits for the choice of the transport to ``address``, and for the next one if that is replaced."""
        while True:
            choosing = self._choosing(address)
            try:
                return choosing, await asyncio.shield(choosing)
            except _Replaced:
                continue
            except Exception:
                self._forget(address, choosing)
                raise

    def _is_due(self, address: str) -> bool:
        """Returns whether to measure again now, and schedules the next time."""
        least, most = AGAIN_S
        now, again = self._clock(), self._again.setdefault(address, _Again(self._clock() + least, least))
        if now < again.at:
            return False
        again.pause = min(most, 2 * again.pause)
        again.at = now + again.pause
        return True

    async def _look_again(self, address: str, choosing: asyncio.Future[PairRoute], route: PairRoute) -> None:
        """Changes the route if consecutive measurements agree on another one. Open streams keep theirs."""
        found: TransportVerdict | None = None
        for _ in range(CONFIRM):
            before = found
            try:
                found = await self._weigh(address, route.info)
            except BatonError as error:
                log.debug("the ways to %s could not be measured again: %s", route.info.worker_id, error)
                return
            if found.best == route.name or (before is not None and before.best != found.best):
                return
        if found is None or self._routes.get(address) is not choosing:
            return
        log.warning(
            "KV to %s goes by %s from now on, no longer by %s", route.info.worker_id, found.best, route.name
        )
        changed: asyncio.Future[PairRoute] = asyncio.get_running_loop().create_future()
        changed.set_result(self._adopt(found, address))
        self._routes[address] = changed

    def expect(self, address: str, incarnation: str) -> None:
        """Drops the route to ``address`` unless it was or is being chosen for process ``incarnation``, which serves
        there now.

        The old process's data addresses might otherwise lead to a worker that has taken over its place.
        """
        known, choosing = self._described.get(address), self._routes.get(address)
        if known is not None and incarnation and known.incarnation != incarnation:
            del self._described[address]
        if choosing is None or not incarnation:
            return
        asked = self._asked[address]  # done before the ways to it are measured
        if _failed(asked) or _failed(choosing) or (asked.done() and asked.result().incarnation != incarnation):
            self._forget(address, choosing)

    async def layout(self, address: str) -> KvLayout:
        """Returns the KV layout of the worker at ``address``, as soon as it has described itself. Raises
        WorkerLost.
        """
        return (await self._info(address)).layout

    async def takes_extents(self, address: str) -> bool:
        """Returns whether the worker at ``address`` takes pages in parts from several hosts. Raises WorkerLost."""
        return (await self._info(address)).takes_extents

    async def receivers(self, address: str) -> tuple[KvReceiver, ...]:
        """Returns the hosts of ranks of the worker at ``address`` that each take a part of every page; () if it
        takes all, as where one of them can't be reached from here. Those beyond MOST_RECEIVERS, which nobody sends
        to, aren't tried. Raises WorkerLost.
        """
        info = await self._info(address)
        for host in info.receivers[1:MOST_RECEIVERS]:
            self.expect(host.address, info.incarnation)
            if not await self._reaches(host.address):
                return ()
        return info.receivers

    async def _reaches(self, address: str) -> bool:
        """Returns whether KV can be shipped to the host of ranks at ``address``; nobody waits for another try."""
        now = self._clock()
        if now < self._unreached.get(address, now):
            return False
        choosing = self._choosing(address)
        if address in self._unreached and not choosing.done():
            return False
        self._unreached.pop(address, None)
        try:
            await self._route(address)
        except BatonError as error:
            _drop_oldest(self._unreached)
            self._unreached[address] = now + AGAIN_S[0]
            log.warning("KV for the ranks at %s goes to their worker's own host: %s", address, error.message)
            return False
        return True

    async def _info(self, address: str) -> WorkerInfo:
        choosing = self._choosing(address)
        try:
            return await asyncio.shield(self._asked[address])
        except Exception:
            self._forget(address, choosing)
            raise

    def peer(self, address: str) -> str:
        """Returns the id of the worker at ``address``, also once the route to it is lost; empty until it has
        described itself.
        """
        known = self._described.get(address)
        return known.worker_id if known is not None else ""

    async def close(self) -> None:
        """Closes every transport and its streams."""
        for future in (running := list(self._running)):
            future.cancel()
        self._routes.clear()
        self._asked.clear()
        await asyncio.gather(*running, return_exceptions=True)
        for transport in self._transports.values():
            await transport.close()

    def _choosing(self, address: str) -> asyncio.Future[PairRoute]:
        if address not in self._routes:
            while len(self._routes) >= KEPT_ROUTES and (done := self._oldest_done()):
                self._forget(done, self._routes[done])  # of a worker that has left, or else it is chosen again
            asked = self._asked[address] = asyncio.ensure_future(self._describe(address))
            choosing = self._routes[address] = asyncio.ensure_future(self._choose(address, asked))
            choosing.add_done_callback(_seen)
            for future in (asked, choosing):
                self._running.add(future)
                future.add_done_callback(self._running.discard)
        return self._routes[address]

    def _oldest_done(self) -> str:
        return next((address for address, choosing in self._routes.items() if choosing.done()), "")

    def _forget(self, address: str, choosing: asyncio.Future[PairRoute]) -> None:
        """Something broke: choose anew next time."""
        if self._routes.get(address) is choosing:
            del self._routes[address], self._asked[address]
            self._again.pop(address, None)

    async def _choose(self, address: str, asked: Awaitable[WorkerInfo]) -> PairRoute:
        info = await asked
        self._require_current(address)
        self._remember(address, info)
        found = await self._weigh(address, info)
        self._require_current(address)
        return self._adopt(found, address)

    def _require_current(self, address: str) -> None:
        """Ends a choice that was forgotten meanwhile: what it has measured is of a process that serves no more."""
        if self._routes.get(address) is not asyncio.current_task():
            raise _Replaced(f"another process serves at {address}")

    def _remember(self, address: str, info: WorkerInfo) -> None:
        self._described.pop(address, None)
        self._described[address] = info
        if len(self._described) > KEPT_ROUTES:
            lost = (known for known in self._described if known not in self._routes and known != address)
            del self._described[next(lost, next(iter(self._described)))]

    async def _weigh(self, address: str, info: WorkerInfo) -> TransportVerdict:
        """Measures every preferred transport that is offered. Raises WorkerLost or HandoffRefused if none works."""
        offered = {"grpc": address, **info.data_addresses}
        preferred = self._preferred(info)
        measured, failures = await preflight.measure_each(
            [name for name in preferred if name in offered],
            lambda name, memory: self._try(name, offered[name], memory),
            self._memory.device,
        )
        if not measured:
            raise no_way(info, preferred, offered, failures)
        return TransportVerdict(info, pick(preferred, measured), preferred, measured, failures)

    def _adopt(self, found: TransportVerdict, address: str) -> PairRoute:
        self._tell(found)
        offered = {"grpc": address, **found.info.data_addresses}
        fell_back = found.reason in ("failed", "slower")
        return PairRoute(self._transport(found.best), offered[found.best], found.info, found.best, fell_back)

    def _preferred(self, info: WorkerInfo) -> Sequence[str]:
        if self._wanted != AUTO:
            return (self._wanted,)
        by_host = PREFERRED_ON_ONE_HOST if self._host_id and info.host_id == self._host_id else OTHER_HOST
        on_card = by_card.by_card(self._memory.device, info, self._host_id, self._memory.page_bytes)
        return (*on_card, *by_host)

    async def _try(self, name: str, address: str, memory: PageMemory) -> LinkSpeed:
        probe = self._sender(name, memory)
        try:
            patience_s = preflight.PATIENCE_S.get(name, preflight.TIMEOUT_S)
            return await preflight.measure(probe, address, memory, self._clock, patience_s)
        finally:
            await probe.close()

    def _transport(self, name: str) -> Transport:
        if name not in self._transports:
            self._transports[name] = self._sender(name, self._memory)
        return self._transports[name]

    def _tell(self, found: TransportVerdict) -> None:
        info, best, reason, text = found.info, found.best, found.reason, ""
        if reason:
            first, failures = found.preferred[0], found.failures
            detail = failures[first].message if first in failures else reason.replace("_", " ")
            text = f"{first} {detail}" if reason != "failed" else f"{first} failed: {detail}"
            log.warning("KV to %s goes by %s: %s", info.worker_id, best, text)
        elif self._memory.device is not None and self._wanted == AUTO:
            why = by_card.why(self._memory.device, info, best, self._memory.page_bytes)
            log.info("KV to %s goes by %s: %s", info.worker_id, best, why)
            text = "" if best in ("cuda_ipc", "nccl") else why
        got = found.measured[best]
        log.info("KV to %s: %s, %.2f GB/s, %.2f ms", info.worker_id, best, got.bytes_per_s / 1e9, got.fixed_s * 1e3)
        self._report(KvLink(info.worker_id, best, got.bytes_per_s, got.fixed_s, text), reason)


def sender(memory: PageMemory) -> Transport:
    """Returns an ``AutoTransport`` over pages of ``memory`` that reports its choices to nobody."""
    return AutoTransport(memory, asyncio.get_running_loop().time)


def _drop_oldest(unreached: dict[str, float]) -> None:
    while len(unreached) >= KEPT_ROUTES:
        del unreached[next(iter(unreached))]


def _failed(future: asyncio.Future[WorkerInfo] | asyncio.Future[PairRoute]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _seen(choosing: asyncio.Future[PairRoute]) -> None:
    """Whoever wanted a layout alone doesn't hear of a choice that failed, and asyncio need not complain of it."""
    if not choosing.cancelled():
        choosing.exception()
