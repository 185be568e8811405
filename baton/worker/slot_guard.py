"""Holds a worker's slot across nodes by a lease in Redis while it serves; the file lock (slots.py) holds it within
one node.

Knows nothing of engines. A Redis that is away stops nobody: the slot is taken when it is back, and who finds it
taken by another then leaves. Only a holder that Redis told of is waited for, until its lease has run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.cluster.membership import connect, end_task
from baton.cluster.store.slot_lease import SlotLease
from baton.kv.wire.describing import this_host
from baton.protos.rpc import heed_cancel
from baton.tasks.lasting import lasting
from baton.worker.spec import WorkerSpec

LEAVE_S = 1.0  # seconds for giving the slot's lease back; without that it runs out by itself
log = logging.getLogger("baton.worker")


class SlotGuard:
    """Waits for the slot's lease on entering, as an async context manager whose value is False if ``stop`` was set
    first.

    ``waits(place)`` is called once if another node has the slot. If the lease is lost later, ``stop`` is set and
    ``lost`` is True. The lease is held in ``redis``, by default the one that ``spec`` names, for ``owner`` at
    ``place``.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        stop: asyncio.Event,
        waits: Callable[[str], None],
        redis: Redis | None = None,
        owner: str = "",
        place: str = "",
    ) -> None:
        self._spec, self._own, self._stop, self._waits = spec, spec.member, stop, waits
        self._given, self._owner = redis, owner or secrets.token_hex(8)
        self._place = place or f"{socket.gethostname()} {this_host()} {spec.slot_dir}"
        self._task: asyncio.Task[None] | None = None
        self.lost = False

    async def __aenter__(self) -> bool:
        if self._given is None and not self._own.redis_url:
            return True
        self._redis = self._given or connect(self._own.redis_url)
        own = self._own
        self._lease = SlotLease(self._redis, own.namespace, self._spec.slot, self._owner, self._place, own.lease_s)
        if not await self._taken():
            await self._close()
            return False
        self._task = lasting(self._keep, "slot lease")
        return True

    async def __aexit__(self, *exc: object) -> None:
        if self._task is None:
            return
        await end_task(self._task)
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._lease.drop()
        await self._close()

    async def _close(self) -> None:
        if self._given is None:
            await self._redis.aclose()

    async def _taken(self) -> bool:
        """Waits for the slot and returns True; False if ``stop`` was set first."""
        clock, held, away_since = asyncio.get_running_loop().time, False, float("inf")
        while not self._stop.is_set():
            try:
                holder = await self._lease.take()
            except (RedisError, OSError) as error:
                away_since = min(away_since, clock())
                if not held or clock() - away_since >= self._own.lease_s:
                    log.warning("Redis is away (%s): slot %s is held on this node alone", error, self._spec.slot)
                    return True
            else:
                if not holder:
                    return True
                if not held:
                    log.warning("slot %s is served from %s; waiting until it is not", self._spec.slot, holder)
                    self._waits(holder.partition(" ")[0])
                held, away_since = True, float("inf")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._own.beat_s)
        return False

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._own.beat_s)
            try:
                ours = await self._lease.keep()
            except (RedisError, OSError):
                ours = True  # for all we know
            heed_cancel()
            if ours:
                continue
            log.error("slot %s is served from another node now: leaving", self._spec.slot)
            self.lost = True
            self._stop.set()
            return
