"""Asks the placer, through Redis, for more or fewer workers (``cluster.scale``), and watches whether they come.

Knows nothing of why (``replica_decision``, pure), nor of Ray: the placer reads what is asked. Workers that don't
come within the cluster's start timeout are asked for no more, so that nobody waits for ever for a worker that there
is no room for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping

import msgspec
from redis.asyncio import Redis

from baton.cluster.advice import TimelineEntry
from baton.cluster.config import BatonConfig
from baton.cluster.membership import WorkerEntry
from baton.cluster.scale import ScaleRequest, ask, read, slots_of
from baton.controller.replica_decision import PlannedSlots, ReplicaDecision, ReplicaHistory, ReplicaSettings

BY = "controller"
SLOT = re.compile(r"(prefill|decode)-\d+")
log = logging.getLogger("baton.controller")


class _PendingScale(msgspec.Struct, frozen=True):
    """Holds the numbers of workers that the controller requested, and those before."""

    change: TimelineEntry
    before: ScaleRequest
    after: ScaleRequest
    inherited: bool = False  # from an earlier leader: nobody knows how long it took


class ReplicaControl:
    """Asks for workers on behalf of the leader; ``history`` is that of ``decide_replicas``.

    Its methods raise RedisError and OSError.
    """

    def __init__(self, redis: Redis, config: BatonConfig) -> None:
        own, cluster = config.controller, config.cluster
        self._redis, self._namespace = redis, cluster.namespace
        self._planned = ScaleRequest(cluster.prefill_workers, cluster.decode)
        self._timeout_s = cluster.start_timeout_s
        self.settings = ReplicaSettings(
            **{k: getattr(own, k) for k in ReplicaSettings.__struct_fields__ if hasattr(own, k)}
        )
        self.history = ReplicaHistory()
        self._serial: int | None = None
        self._serial_at = float("-inf")
        self._asked: _PendingScale | None = None
        self._begins = True  # this router has just begun to lead

    def lead(self, at: float) -> None:
        """Forgets earlier requests as this router begins to lead; ``at`` starts a cool-down, in Unix seconds.

        What an earlier leader asked for and hasn't got is waited for anew.
        """
        self.history, self._serial, self._asked = ReplicaHistory(changed_at=at), None, None
        self._begins = True

    async def placed(
        self, at: float, members: Mapping[str, WorkerEntry]
    ) -> tuple[PlannedSlots, TimelineEntry | None]:
        """Returns the slots that are planned and awaited; and the outcome of the last request, once, when it is
        known.
        """
        scale = await self._scale(at)
        here = {slot: entry.info for slot, entry in members.items() if SLOT.fullmatch(slot)}
        if self._begins and scale.by == BY:
            self._asked = _inherited(at, scale, here.keys(), self.settings.most_moves)
        self._begins = False
        news = await self._follow(at, scale, {slot: info.state for slot, info in here.items()})
        if news is not None and news.kind == "failed":
            scale = await self._scale(at)
        wanted = slots_of(scale)
        waits = at - self._serial_at < self._timeout_s
        awaited = sorted(wanted.keys() ^ here.keys()) if waits else []
        last = (
            here.get(f"{kind}-{count - 1}")
            for kind, count in (("prefill", scale.prefill), ("decode", scale.decode))
        )
        roles = [info.role if info is not None and info.state == "ready" else "" for info in last]
        return PlannedSlots(scale.prefill, scale.decode, roles[0], roles[1], tuple(awaited)), news

    async def ask(self, at: float, before: tuple[int, int], found: ReplicaDecision) -> TimelineEntry:
        """Asks for the numbers of slots decided on, unless others asked for some since ``placed``; returns the
        change for the timeline. Raises ConfigError.

        ``before`` is the present (prefill, decode) ratio of roles.
        """
        old = await read(self._redis, self._namespace) or self._planned
        new = await self._write(at, ScaleRequest(found.prefill, found.decode))
        if new is None:
            return TimelineEntry(at, "hold", before, before, "others asked for numbers of workers meanwhile")
        changed = tuple(sorted(slots_of(old).keys() ^ slots_of(new).keys()))
        log.info("%s %s: %s", found.kind, ", ".join(changed), found.reason)
        change = TimelineEntry(at, found.kind, before, found.after, found.reason, changed)
        self._asked, self.history = _PendingScale(change, old, new), self.history.changed(at)
        return change

    async def _scale(self, at: float) -> ScaleRequest:
        """Returns the last request for workers; one by an operator counts as a change that isn't ours."""
        scale = await read(self._redis, self._namespace) or self._planned
        if scale.serial != self._serial:
            if self._serial is not None and scale.by != BY:
                self.history, self._asked = self.history.changed(at, by_operator=True), None
            self._serial, self._serial_at = scale.serial, at
        return scale

    async def _follow(self, at: float, scale: ScaleRequest, states: Mapping[str, str]) -> TimelineEntry | None:
        asked = self._asked
        if asked is None:
            return None
        took = at - asked.change.at
        fresh = slots_of(asked.after).keys() - slots_of(asked.before).keys()
        gone = slots_of(asked.before).keys() - slots_of(asked.after).keys()
        if all(states.get(slot) == "ready" for slot in fresh) and not gone & states.keys():
            self._asked = None
            if fresh and not asked.inherited:
                self.history = self.history.started(took)
            return msgspec.structs.replace(asked.change, seconds=took)
        if took < self._timeout_s:
            return None
        self._asked, self.history = None, self.history.failed(at)
        late = sorted(slot for slot in fresh if states.get(slot) != "ready") or sorted(gone & states.keys())
        why = f"{', '.join(late)} not {'here' if fresh else 'gone'} after {took:.0f} s"
        if fresh:
            await self._write(at, asked.before)  # or others have asked since: then their numbers hold
            why += ", so it is asked for no more; is there room, and does whoever places workers run?"
        return msgspec.structs.replace(
            asked.change, at=at, kind="failed", reason=f"{asked.change.kind}: {why}", seconds=took
        )

    async def _write(self, at: float, scale: ScaleRequest) -> ScaleRequest | None:
        """Asks for other numbers; None if somebody else asked since they were last read: his are kept."""
        scale = msgspec.structs.replace(scale, by=BY)
        last = self._serial or 0
        asked = await ask(self._redis, self._namespace, scale, self._planned, after=last)
        if asked.serial != last + 1 or asked.by != BY:
            return None
        self._serial, self._serial_at = asked.serial, at
        return asked


def _inherited(at: float, scale: ScaleRequest, here: Collection[str], most: int) -> _PendingScale | None:
    """Returns what an earlier leader asked for where the last slots, ``most`` at the most, aren't here yet; None if
    there are none. If they don't come, this leader takes them back.
    """
    prefill, decode = scale.prefill, scale.decode
    while prefill and f"prefill-{prefill - 1}" not in here:
        prefill -= 1
    while decode > 1 and f"decode-{decode - 1}" not in here:
        decode -= 1
    before = msgspec.structs.replace(scale, prefill=prefill, decode=decode)
    late = sorted(slots_of(scale).keys() - slots_of(before).keys())
    if not 0 < len(late) <= most:
        return None
    pairs = (prefill, decode), (scale.prefill, scale.decode)
    change = TimelineEntry(at, "add", *pairs, "asked for by an earlier leader", tuple(late))
    return _PendingScale(change, before, scale, inherited=True)
