"""What every worker answers whatever its role: Describe, Drain, Snapshot, Fetch.

Knows nothing of prompts or answers; a role's service is anything that counts and cancels its requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from baton.kv.source import BlockSource
from baton.protos import channel as ch
from baton.protos import convert
from baton.protos.errors import BatonError, WorkerLost
from baton.protos.nouns import PoolSnapshot, WorkerInfo
from baton.protos.rpc import abort
from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs

LOOK_EVERY_S = 0.02


class RoleService(Protocol):
    """DecodeService or PrefillService."""

    finished: int

    @property
    def active(self) -> int:
        """Requests that have not ended."""

    def take(self, message: Any) -> None:
        """Act on an engine's message."""

    def cancel_all(self, reason: str) -> int:
        """End what runs; how many that were."""

    def lost(self, error: BatonError) -> None:
        """The engine is gone."""


class WorkerControl:
    """The worker's own state, in its I/O process."""

    def __init__(self, info: WorkerInfo, send: Callable[[msgspec.Struct], None], service: RoleService):
        self.info = info
        self._send = send
        self._service = service
        self._tickets = itertools.count(1)
        self._asked: dict[int, asyncio.Future[PoolSnapshot]] = {}

    async def snapshot(self) -> PoolSnapshot:
        """The pool, counted by the engine between two steps. Raises WorkerLost when it dies meanwhile."""
        ticket = next(self._tickets)
        self._asked[ticket] = answer = asyncio.get_running_loop().create_future()
        self._send(ch.AskSnapshot(ticket))
        try:
            return msgspec.structs.replace(await answer, incarnation=self.info.incarnation)
        finally:
            del self._asked[ticket]

    def answered(self, message: ch.SnapshotIs) -> None:
        """The engine counted."""
        answer = self._asked.get(message.ticket)
        if answer is not None and not answer.done():
            answer.set_result(message.snapshot)

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Take nothing new; requests that finished within ``grace_s``, and those that had to be cancelled."""
        before = self._service.finished
        self.info = msgspec.structs.replace(self.info, state="draining")
        self._send(ch.Drain())
        await self._idle_within(grace_s)
        cancelled = self._service.cancel_all("draining")
        if cancelled:
            await self._idle_within(1.0)
        return self._service.finished - before, cancelled

    def lost(self, error: WorkerLost) -> None:
        """The engine is gone."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)

    async def _idle_within(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while self._service.active and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)


class WorkerShell(stubs.WorkerServicer):
    """gRPC around WorkerControl and the blocks that others may fetch."""

    def __init__(self, control: WorkerControl, source: BlockSource):
        self._control = control
        self._source = source

    async def Describe(self, request: w.DescribeRequest, context: Any) -> w.WorkerInfo:
        """At once, whatever the engine does."""
        return convert.info_to_pb(self._control.info)

    async def Snapshot(self, request: w.SnapshotRequest, context: Any) -> w.PoolSnapshot:
        """Counted after the step in flight."""
        try:
            return convert.snapshot_to_pb(await self._control.snapshot())
        except BatonError as error:
            await abort(context, error)

    async def Drain(self, request: w.DrainRequest, context: Any) -> w.DrainResponse:
        """Returns when nothing runs any more."""
        finished, cancelled = await self._control.drain(request.grace_seconds)
        return w.DrainResponse(finished=finished, cancelled=cancelled)

    async def Fetch(self, request: w.FetchRequest, context: Any) -> AsyncIterator[w.FetchedBlock]:
        """The leading blocks that are cached here."""
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
