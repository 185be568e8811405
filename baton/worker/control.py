"""The calls that every worker answers, whatever its role: Describe, Drain, Snapshot, Fetch, SetRole, and those on
adapters.

Knows nothing of prompts or answers; a role's service is anything that counts and cancels its requests.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Protocol

import grpc.aio
import msgspec

from baton.cluster.roles import ROLES
from baton.kv.exchange.source import BlockSource
from baton.protos import channel as ch
from baton.protos import convert
from baton.protos.errors import BatonError, Draining, ErrorInfo, InvalidRequest, Unavailable, WorkerLost
from baton.protos.nouns import (
    AdapterLimits,
    EngineRequest,
    KvReceiver,
    PoolSnapshot,
    Sampling,
    WorkerInfo,
    process_of,
)
from baton.protos.rpc import abort
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.tasks.outlasting import outlasted
from baton.worker.adapter_calls import NO_ADAPTERS, AdapterCalls
from baton.worker.cache.pins import PrefixPins
from baton.worker.engine_progress import EngineProgress

LOOK_EVERY_S = 0.02  # seconds between two looks whether requests have ended: a drain is that much longer at most
AWAY_S = 0.05  # seconds in which routers hear that their requests go elsewhere, before those are cancelled
MAX_GRACE_S = 600.0  # seconds of grace at most, because a worker that drains for longer is better ended


class RoleService(Protocol):
    """Declares what a worker asks of its role's service, a DecodeService or a PrefillService; ``finished`` counts
    finished requests.
    """

    finished: int

    @property
    def active(self) -> int:
        """Returns the number of requests that have not ended."""

    def take(self, message: ch.FromEitherRole) -> None:
        """Handles one message of the engine about requests."""

    def cancel_all(self, reason: str) -> int:
        """Cancels every running request; returns their number."""

    def send_away(self, error: BatonError) -> int:
        """Tells routers to place elsewhere those requests that lose nothing by it; returns their number."""

    def hang_up(self) -> None:
        """Closes every router's session after what is queued for it is sent."""

    def lost(self, error: BatonError) -> None:
        """Ends every request with ``error``, because the engine has died."""


class RoleSwitch(msgspec.Struct, frozen=True):
    """Describes a change of role that was asked for: the new role, the seconds for running prefills, and the
    worker's next incarnation.
    """

    role: str
    grace_s: float
    incarnation: str

    def became(self, role: str, error: ErrorInfo | None, new_id: Callable[[], str]) -> RoleSwitch:
        """Returns the change that came of this one: the engine has ``role`` now, which isn't the one that was asked
        for if there is an ``error``. Nobody who waits for the other one may take that life for it.
        """
        if error is None:
            return self
        return RoleSwitch(role, self.grace_s, f"{process_of(self.incarnation)}.{new_id()}")


class WorkerControl:
    """Holds the worker's own description, ``info``, in its I/O process, and changes it as others ask.

    ``announce(info, role, turn)`` publishes that the worker drains, and the role that it is to take. It returns
    False if Redis is away, or the turn is over in which a router asked for that. ``tickets`` number questions to
    the engine, and outlive a role. ``progress`` tells whether the engine gets on while it doesn't answer.
    """

    def __init__(
        self,
        info: WorkerInfo,
        send: ch.SendToEngine,
        service: RoleService,
        adapter_limits: AdapterLimits = NO_ADAPTERS,
        new_id: Callable[[], str] = partial(secrets.token_hex, 8),
        tickets: Iterator[int] | None = None,
        progress: EngineProgress | None = None,
    ):
        self.info = info
        self.receivers: tuple[KvReceiver, ...] = ()  # hosts that take a part of every page; Describe tells of them
        self._progress = progress or EngineProgress(dict, math.inf)
        self._new_id = new_id
        self._tickets = itertools.count(1) if tickets is None else tickets
        self.adapters = AdapterCalls(send, adapter_limits, self._adapters_are, self._tickets)
        self._send = send
        self._service = service
        self._asked: dict[int, asyncio.Future[PoolSnapshot]] = {}
        self._answered_at = -math.inf
        self._lost: WorkerLost | None = None
        self._role_asked: asyncio.Future[RoleSwitch] = asyncio.get_running_loop().create_future()
        self._confirmed = asyncio.Event()
        self.drains = False  # for good: it is to leave
        self.announce: Callable[[WorkerInfo, str, str], Awaitable[bool]] | None = None

    async def snapshot(self) -> PoolSnapshot:
        """Returns the page pool's counts between two engine steps. Raises WorkerLost if the engine dies."""
        if self._lost is not None:
            raise self._lost
        ticket = next(self._tickets)
        self._asked[ticket] = answer = asyncio.get_running_loop().create_future()
        self._send(ch.AskSnapshot(ticket))
        try:
            return msgspec.structs.replace(await answer, incarnation=self.info.incarnation)
        finally:
            del self._asked[ticket]

    async def progress(self) -> PoolSnapshot:
        """Returns what ``snapshot`` does, or at once that the engine is computing, where it gets on with a step.

        Raises WorkerLost.
        """
        asked: asyncio.Future[PoolSnapshot] = asyncio.ensure_future(self.snapshot())
        try:
            if await self._progress.computes_instead(asked):
                return PoolSnapshot(incarnation=self.info.incarnation, computing=True)
            return asked.result()
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    def silent_s(self) -> float:
        """Returns the seconds since the engine answered anybody's question for its counts."""
        return asyncio.get_running_loop().time() - self._answered_at

    def answered(self, message: ch.SnapshotIs) -> None:
        """Passes the engine's pool counts to the calls that wait for them."""
        self._progress.answered()
        self._answered_at = asyncio.get_running_loop().time()
        answer = self._asked.get(message.ticket)
        if answer is not None and not answer.done():
            answer.set_result(message.snapshot)

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Accepts no new work; returns how many requests finished within ``grace_s`` seconds, and how many were
        cancelled then. Their routers hear that the worker drains, not that it failed.
        """
        before = self._service.finished
        self.begin_drain()
        await self._idle_within(grace_s)
        cancelled = await self._empty(Draining(f"{self.info.worker_id} drains; go on elsewhere"), "draining")
        if cancelled:
            await self._idle_within(1.0)
        return self._service.finished - before, cancelled

    async def _empty(self, away: Draining, reason: str) -> int:
        """Sends requests elsewhere and cancels all of them, once routers have heard of it; returns how many were
        cancelled.
        """
        if self._service.send_away(away):
            await asyncio.sleep(AWAY_S)
        return self._service.cancel_all(reason)

    def begin_drain(self) -> None:
        """Accepts no new work from now on."""
        self.drains = True
        self.info = msgspec.structs.replace(self.info, state="draining")
        self._send(ch.Drain())

    async def set_role(self, role: str, grace_s: float, turn: str = "") -> str:
        """Begins a change of role; returns the incarnation under which ``role`` will be served.

        Running prefills get ``grace_s`` seconds. ``turn`` names the asking router's turn to change roles ("": it
        has none), after whose end nothing begins. Raises InvalidRequest, Draining, Unavailable.
        """
        if role not in ROLES:
            raise InvalidRequest(f"role {role!r}: a worker is one of {', '.join(ROLES)}", "role")
        require_grace(grace_s)
        if self._role_asked.done():
            return self._pending(role)
        if role == self.info.role:
            return self.info.incarnation
        if self.info.state != "ready":
            raise Draining(f"{self.info.worker_id} is {self.info.state}; ask when it is ready")
        incarnation = f"{process_of(self.info.incarnation)}.{self._new_id()}"
        ask = RoleSwitch(role, grace_s, incarnation)
        self.info = msgspec.structs.replace(self.info, state="draining")
        self._role_asked.set_result(ask)
        (told,) = await outlasted(asyncio.create_task(self._announced(role, turn)))
        if not told:
            raise Unavailable(
                "Redis is away, and routers wouldn't hear of the new role, or the turn is over of the router that "
                "asked for it; try again",
                retry_after_s=1.0,
            )
        return ask.incarnation

    async def _announced(self, role: str, turn: str) -> bool:
        """Announces the change of role that was asked for and begins it, or takes it back; returns whether it was
        announced. Whoever asked may be gone meanwhile: half a change would leave the worker draining for good.
        """
        told = False
        try:
            told = self.announce is None or await self.announce(self.info, role, turn)
        finally:
            if told:
                self._confirmed.set()
            else:
                self.info = msgspec.structs.replace(self.info, state="draining" if self.drains else "ready")
                self._role_asked = asyncio.get_running_loop().create_future()
        return told

    async def next_role_change(self) -> RoleSwitch:
        """Waits until a change of role is asked for and announced, and returns it."""
        await self._confirmed.wait()
        return self._role_asked.result()

    async def leave_role(self, ask: RoleSwitch) -> None:
        """Ends every request: decoding ones are moved to other workers at once, prefills may finish within the
        grace.
        """
        self._send(ch.Drain())
        away = Draining(f"{self.info.worker_id} becomes a {ask.role} worker; go on elsewhere")
        if self._service.send_away(away):
            await asyncio.sleep(AWAY_S)
            self._service.cancel_all("it changes its role")
        await self._idle_within(ask.grace_s)
        if self._service.cancel_all("it changes its role"):
            await self._idle_within(1.0)
        self._service.hang_up()

    def _pending(self, role: str) -> str:
        ask = self._role_asked.result()
        if ask.role != role:
            raise Draining(f"{self.info.worker_id} is becoming a {ask.role} worker; ask again when it is")
        return ask.incarnation

    def _adapters_are(self, adapters: tuple[str, ...]) -> None:
        self.info = msgspec.structs.replace(self.info, adapters=adapters)

    def lost(self, error: WorkerLost) -> None:
        """Ends every question to the engine, now and later, with ``error``, because the engine has died."""
        self._lost = error
        self.adapters.lost(error)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)

    async def _idle_within(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while self._service.active and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)


class WorkerShell(stubs.WorkerServicer):
    """Serves ``baton.v1.Worker`` over gRPC, around WorkerControl and the cached blocks that others may fetch."""

    def __init__(self, control: WorkerControl, source: BlockSource, pins: PrefixPins | None = None):
        self._control, self._source, self._pins = control, source, pins

    async def Describe(self, request: w.DescribeRequest, context: grpc.aio.ServicerContext) -> w.WorkerInfo:
        """Answers with the worker's description, without asking the engine."""
        return convert.info_to_pb(msgspec.structs.replace(self._control.info, receivers=self._control.receivers))

    async def Snapshot(self, request: w.SnapshotRequest, context: grpc.aio.ServicerContext) -> w.PoolSnapshot:
        """Answers with the page pool's counts after the engine step, or at once that it is a long one."""
        ask = self._control.progress if request.unless_computing else self._control.snapshot
        try:
            return convert.snapshot_to_pb(await ask())
        except BatonError as error:
            await abort(context, error)

    async def Drain(self, request: w.DrainRequest, context: grpc.aio.ServicerContext) -> w.DrainResponse:
        """Drains the worker; answers when no request runs any more."""
        try:
            require_grace(request.grace_seconds)
        except BatonError as error:
            await abort(context, error)
        finished, cancelled = await self._control.drain(request.grace_seconds)
        return w.DrainResponse(finished=finished, cancelled=cancelled)

    async def SetRole(self, request: w.SetRoleRequest, context: grpc.aio.ServicerContext) -> w.SetRoleResponse:
        """Begins a change of role and answers at once, because this server ends with the role."""
        try:
            incarnation = await self._control.set_role(request.role, request.grace_seconds, request.turn)
        except BatonError as error:
            await abort(context, error)
        return w.SetRoleResponse(incarnation=incarnation)

    async def LoadAdapter(self, request: w.LoadAdapterRequest, context: grpc.aio.ServicerContext) -> w.AdapterInfo:
        """Loads an adapter from beneath the adapter root; answers once requests may use it."""
        asked = request.name, request.path, request.digest, request.pinned
        try:
            return convert.adapter_to_pb(await self._control.adapters.load(*asked))
        except BatonError as error:
            await abort(context, error)

    async def UnloadAdapter(
        self, request: w.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> w.AdapterInfo:
        """Has the engine accept no new request on an adapter; answers at once, with the number of requests that run
        on it.
        """
        try:
            return convert.adapter_to_pb(await self._control.adapters.unload(request.id))
        except BatonError as error:
            await abort(context, error)

    async def ListAdapters(
        self, request: w.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> w.ListAdaptersResponse:
        """Answers with the adapters in memory and the limits on them."""
        own = self._control.adapters
        try:
            found = await own.held()
        except BatonError as error:
            await abort(context, error)
        return w.ListAdaptersResponse(
            adapters=map(convert.adapter_to_pb, found),
            max_loaded=own.limits.max_loaded,
            max_bytes=own.limits.max_bytes,
            max_rank=own.limits.max_rank,
        )

    async def PinPrefix(
        self, request: w.PinPrefixRequest, context: grpc.aio.ServicerContext
    ) -> w.PinPrefixResponse:
        """Pins a prefix's cached blocks; answers with the number of pinned tokens."""
        ids = tuple(request.token_ids)
        prefix = EngineRequest(request.pin, ids, len(ids), Sampling(), 0, request.adapter_id, request.tenant_salt)
        try:
            if self._pins is None:
                raise Unavailable("this worker pins no prefixes")
            tokens = await self._pins.pin(request.pin, prefix, request.ttl_seconds, request.source)
        except BatonError as error:
            await abort(context, error)
        return w.PinPrefixResponse(tokens=tokens)

    async def UnpinPrefix(
        self, request: w.UnpinPrefixRequest, context: grpc.aio.ServicerContext
    ) -> w.UnpinPrefixResponse:
        """Unpins a prefix; answers whether it was pinned."""
        return w.UnpinPrefixResponse(found=self._pins is not None and self._pins.unpin(request.pin))

    async def Fetch(
        self, request: w.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[w.FetchedBlock]:
        """Streams those of the leading blocks asked for that are cached here."""
        layout = convert.layout_from_pb(request.layout)
        try:
            async with aclosing(self._source.fetch(request.model_id, tuple(request.hashes), layout)) as pages:
                async for page in pages:
                    yield w.FetchedBlock(
                        hash=page.hash,
                        checksum=page.checksum,
                        data=page.data,
                        shard_rank=layout.shard_rank,
                        shard_count=layout.shard_count,
                    )
        except BatonError as error:
            await abort(context, error)


def require_grace(grace_s: float) -> None:
    """Raises InvalidRequest unless ``grace_s`` is a number of seconds from 0 to MAX_GRACE_S."""
    if not 0 <= grace_s <= MAX_GRACE_S:  # nan is neither
        raise InvalidRequest(f"grace_seconds {grace_s}: give 0 to {MAX_GRACE_S:g}", "grace_seconds")
