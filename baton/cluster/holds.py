"""Holds: workers that an operator took out of rotation, for every router to obey, until they are put back.

Knows nothing of requests. A hold belongs to a slot, so it outlives the worker's restart. Routers see a held worker
in another state than it reports: "standby" (drained: it gets no new requests and finishes its own) or "draining"
(ejected: its requests move elsewhere at once). While Redis is away the last known holds count; a Redis that lost
them is told again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from baton.cluster.departures import Departure, Departures, last_words
from baton.cluster.membership import BEAT_S, PolledRoster, WorkerEntry
from baton.cluster.store.kept_values import Answers, KeptValues
from baton.protos.errors import Unavailable
from baton.protos.rpc import heed_cancel
from baton.tasks.lasting import count_failure, lasting

log = logging.getLogger("baton.cluster")
How = Literal["drain", "eject"]
STATES: dict[str, str] = {"drain": "standby", "eject": "draining"}


class SlotHold(msgspec.Struct, frozen=True):
    """Describes why a slot gets no requests: held by whom, and ``at`` Unix seconds."""

    how: How
    by: str = ""
    at: float = 0.0


class HoldStore:
    """Keeps the holds of one cluster in Redis."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        self._redis, self._key = redis, f"{{{namespace}}}:holds"
        self._kept = KeptValues(
            redis, f"{self._key}:kept", "the holds", lambda pipe: pipe.hgetall(self._key), self._write
        )

    async def put(self, slot: str, hold: SlotHold | None) -> None:
        """Stores the hold of a slot; None removes it. Raises Unavailable."""
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                self._kept.sign(pipe)
                if hold is None:
                    pipe.hdel(self._key, slot)
                else:
                    pipe.hset(self._key, slot, msgspec.json.encode(hold).decode())
                await pipe.execute()
        except (RedisError, OSError) as error:
            raise Unavailable(
                "Redis is away: routers would not hear of it; try again", retry_after_s=1.0
            ) from error

    async def all(self) -> dict[str, SlotHold]:
        """Returns all holds by slot; where Redis has lost them, writes those that were read last. Raises RedisError
        and OSError.
        """
        [rows] = cast(Sequence[dict[bytes, bytes]], await self._kept.all())
        return {slot.decode(): hold for slot, row in rows.items() if (hold := _decoded(row)) is not None}

    def _write(self, pipe: Pipeline, known: Answers) -> None:
        [rows] = cast(Sequence[dict[bytes, bytes]], known)
        for slot, row in rows.items():
            pipe.hset(self._key, slot.decode(), row.decode())


class RosterWithHolds:
    """Shows a roster with held workers' states replaced; as an async context manager it reads the holds every
    ``poll_s`` seconds.

    The roster itself must be run by the caller.
    """

    def __init__(
        self, roster: PolledRoster, holds: HoldStore, poll_s: float = BEAT_S, departures: Departures | None = None
    ) -> None:
        self.store, self.departures = holds, departures
        self.holds: Mapping[str, SlotHold] = {}
        self._roster, self._poll_s = roster, poll_s
        self._gone: Sequence[Departure] = ()
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Returns whether Redis answered the roster's last read."""
        return self._roster.connected

    @property
    def away_s(self) -> float | None:
        """Returns the seconds since Redis was first found away; None while it answers."""
        return self._roster.away_s

    def snapshot(self) -> dict[str, WorkerEntry]:
        """Returns the roster's entries by worker id, held workers in the state that STATES gives."""
        return {name: self._seen(name, entry) for name, entry in self._roster.snapshot().items()}

    def last_words(self, role: str, model_id: str) -> str:
        """Returns which worker of ``role`` and ``model_id`` left last, and why, as of the last look; "" if none is
        known.
        """
        now = 0.0 if self.departures is None else self.departures.now()
        return last_words(self._gone, role, model_id, now)

    async def refresh(self) -> dict[str, WorkerEntry]:
        """Reads the roster and the holds from Redis now; returns what ``snapshot`` would."""
        await self._roster.refresh()
        await self._look()
        return self.snapshot()

    async def __aenter__(self) -> RosterWithHolds:
        await self._look()
        self._task = lasting(self._run, "holds")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _seen(self, name: str, entry: WorkerEntry) -> WorkerEntry:
        hold = self.holds.get(name)
        if hold is None or entry.info.state != "ready":
            return entry
        return entry._replace(info=msgspec.structs.replace(entry.info, state=STATES[hold.how]))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self._look()
            except Exception:  # one that stops looking would hold a worker for ever, or never
                log.exception("the holds could not be read")
                count_failure("holds")
            heed_cancel()

    async def _look(self) -> None:
        for gone in self._roster.missed():
            if self.departures is not None:
                await self.departures.note(gone)
        try:
            self.holds = await self.store.all()
        except (RedisError, OSError):
            return
        if self.departures is not None:
            self._gone = await self.departures.recent()


def _decoded(row: bytes) -> SlotHold | None:
    try:
        return msgspec.json.decode(row, type=SlotHold)
    except msgspec.MsgspecError as error:
        log.warning("a hold is not readable: %s", error)
        return None
