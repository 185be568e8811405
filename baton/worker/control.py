"""What every worker answers whatever its role: Describe, Drain, Snapshot, Fetch, SetRole, and its adapters.

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
from baton.protos.errors import BatonError, Draining, InvalidRequest, Unavailable, WorkerLost
from baton.protos.nouns import AdapterLimits, EngineRequest, PoolSnapshot, Sampling, WorkerInfo
from baton.protos.rpc import abort
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.worker.adapter_calls import NO_ADAPTERS, AdapterCalls
from baton.worker.pins import PrefixPins

LOOK_EVERY_S = 0.02  # seconds between two looks whether requests have ended: a drain is that much longer at most
AWAY_S = 0.05  # seconds in which routers hear that their requests go elsewhere, before those are cancelled
MAX_GRACE_S = 600.0  # seconds of grace at most, because a worker that drains for longer is better ended


class RoleService(Protocol):
    """Names what a worker asks of its role's service, which is a DecodeService or a PrefillService."""

    finished: int

    @property
    def active(self) -> int:
        """Requests that have not ended."""

    def take(self, message: ch.FromEitherRole) -> None:
        """Acts on a message of the engine about requests."""

    def cancel_all(self, reason: str) -> int:
        """Ends every request that runs; returns how many those were."""

    def send_away(self, error: BatonError) -> int:
        """Tells routers of the requests that lose nothing by going on elsewhere; returns how many those were."""

    def hang_up(self) -> None:
        """Ends every router's session after what is queued for it."""

    def lost(self, error: BatonError) -> None:
        """Ends every request with ``error``, because the engine is gone."""


class RoleSwitch(msgspec.Struct, frozen=True):
    """Says that somebody asked the worker to play ``role``, and to be known as ``incarnation`` then."""

    role: str
    grace_s: float
    incarnation: str


class WorkerControl:
    """Holds the worker's own state in its I/O process, and changes it as others ask.

    ``announce(info, role)`` makes it known that this worker drains, and remembers what it is to become; False
    when nobody can be told. ``tickets`` number what the engine is asked, and outlive a role.
    """

    def __init__(
        self,
        info: WorkerInfo,
        send: ch.SendToEngine,
        service: RoleService,
        adapter_limits: AdapterLimits = NO_ADAPTERS,
        new_id: Callable[[], str] = partial(secrets.token_hex, 8),
        tickets: Iterator[int] | None = None,
    ):
        self.info = info
        self._new_id = new_id
        self._tickets = itertools.count(1) if tickets is None else tickets
        self.adapters = AdapterCalls(send, adapter_limits, self._adapters_are, self._tickets)
        self._send = send
        self._service = service
        self._asked: dict[int, asyncio.Future[PoolSnapshot]] = {}
        self._lost: WorkerLost | None = None
        self._role_asked: asyncio.Future[RoleSwitch] = asyncio.get_running_loop().create_future()
        self._confirmed = asyncio.Event()
        self.announce: Callable[[WorkerInfo, str], Awaitable[bool]] | None = None

    async def snapshot(self) -> PoolSnapshot:
        """Returns the pool as the engine counts it between two steps. Raises WorkerLost when it dies meanwhile."""
        if self._lost is not None:
            raise self._lost
        ticket = next(self._tickets)
        self._asked[ticket] = answer = asyncio.get_running_loop().create_future()
        self._send(ch.AskSnapshot(ticket))
        try:
            return msgspec.structs.replace(await answer, incarnation=self.info.incarnation)
        finally:
            del self._asked[ticket]

    def answered(self, message: ch.SnapshotIs) -> None:
        """Hands the engine's count to whoever asked for it."""
        answer = self._asked.get(message.ticket)
        if answer is not None and not answer.done():
            answer.set_result(message.snapshot)

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Takes nothing new; returns how many requests finished within ``grace_s``, and how many were cancelled."""
        before = self._service.finished
        self.info = msgspec.structs.replace(self.info, state="draining")
        self._send(ch.Drain())
        await self._idle_within(grace_s)
        cancelled = self._service.cancel_all("draining")
        if cancelled:
            await self._idle_within(1.0)
        return self._service.finished - before, cancelled

    async def set_role(self, role: str, grace_s: float) -> str:
        """Begins to change the role; returns the incarnation under which ``role`` will be served.

        Raises InvalidRequest, Draining, Unavailable.
        """
        if role not in ROLES:
            raise InvalidRequest(f"role {role!r}: a worker is one of {', '.join(ROLES)}", "role")
        if not 0 <= grace_s <= MAX_GRACE_S or math.isnan(grace_s):
            raise InvalidRequest(f"grace_seconds {grace_s}: give 0 to {MAX_GRACE_S:g}", "grace_seconds")
        if self._role_asked.done():
            return self._pending(role)
        if role == self.info.role:
            return self.info.incarnation
        if self.info.state != "ready":
            raise Draining(f"{self.info.worker_id} is {self.info.state}; ask when it is ready")
        ask = RoleSwitch(role, grace_s, self._new_id())
        before, self.info = self.info, msgspec.structs.replace(self.info, state="draining")
        self._role_asked.set_result(ask)
        if self.announce is not None and not await self.announce(self.info, role):
            self.info, self._role_asked = before, asyncio.get_running_loop().create_future()
            raise Unavailable("Redis is away: routers wouldn't hear of the new role; try again", retry_after_s=1.0)
        self._confirmed.set()
        return ask.incarnation

    async def role_asked(self) -> RoleSwitch:
        """Returns the change of role once somebody asked for one and routers were told."""
        await self._confirmed.wait()
        return self._role_asked.result()

    async def leave_role(self, ask: RoleSwitch) -> None:
        """Let every request go: answers move at once, prompts are read to their end within the grace."""
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
        """Ends what the engine was asked, now and later, with ``error``, because the engine is gone."""
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
    """gRPC around WorkerControl and the blocks that others may fetch."""

    def __init__(self, control: WorkerControl, source: BlockSource, pins: PrefixPins | None = None):
        self._control, self._source, self._pins = control, source, pins

    async def Describe(self, request: w.DescribeRequest, context: grpc.aio.ServicerContext) -> w.WorkerInfo:
        """Answers at once who this worker is, whatever the engine does."""
        return convert.info_to_pb(self._control.info)

    async def Snapshot(self, request: w.SnapshotRequest, context: grpc.aio.ServicerContext) -> w.PoolSnapshot:
        """Answers with the pool's counts after the step in flight."""
        try:
            return convert.snapshot_to_pb(await self._control.snapshot())
        except BatonError as error:
            await abort(context, error)

    async def Drain(self, request: w.DrainRequest, context: grpc.aio.ServicerContext) -> w.DrainResponse:
        """Drains the worker; answers when nothing runs any more."""
        finished, cancelled = await self._control.drain(request.grace_seconds)
        return w.DrainResponse(finished=finished, cancelled=cancelled)

    async def SetRole(self, request: w.SetRoleRequest, context: grpc.aio.ServicerContext) -> w.SetRoleResponse:
        """Changes the role; answers as soon as that has begun, because this server goes with the role."""
        try:
            incarnation = await self._control.set_role(request.role, request.grace_seconds)
        except BatonError as error:
            await abort(context, error)
        return w.SetRoleResponse(incarnation=incarnation)

    async def LoadAdapter(self, request: w.LoadAdapterRequest, context: grpc.aio.ServicerContext) -> w.AdapterInfo:
        """Loads an adapter from beneath the root; answers once requests may use it."""
        asked = request.name, request.path, request.digest, request.pinned
        try:
            return convert.adapter_to_pb(await self._control.adapters.load(*asked))
        except BatonError as error:
            await abort(context, error)

    async def UnloadAdapter(
        self, request: w.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> w.AdapterInfo:
        """Takes no new request on an adapter; answers at once, with how many run on it."""
        try:
            return convert.adapter_to_pb(await self._control.adapters.unload(request.id))
        except BatonError as error:
            await abort(context, error)

    async def ListAdapters(
        self, request: w.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> w.ListAdaptersResponse:
        """Answers with the adapters in memory and the bounds on them."""
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
        """Pins a prefix's blocks; answers how much of it is pinned."""
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
        """Lets a prefix's blocks be evicted again."""
        return w.UnpinPrefixResponse(found=self._pins is not None and self._pins.unpin(request.pin))

    async def Fetch(
        self, request: w.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[w.FetchedBlock]:
        """Streams the leading blocks that are cached here."""
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
