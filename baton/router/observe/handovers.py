"""Finds workers that can't hand KV over to one another, why, and what to do about it.

Knows nothing of Redis, connections or how it is shown. Requests find other ways meanwhile, so such a pair shows
nowhere but in TTFT: a decode worker without a prefill worker reads prompts itself, beside its answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from baton.kv.layout.bridge import obstacles_between
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo
from baton.tasks.beside import beside
from baton.tasks.lasting import count_failure

log = logging.getLogger("baton.router")

EVERY_S = 5.0  # seconds between two looks; what both found is no passing state of a start or an upgrade
CAUSES = ("weights", "layout", "failing")
MOST = 64  # obstacles that are listed: one setting of many workers gives one for each pair
REMEDIES = {
    "weights": "serve one checkpoint and quantization under a name, the other under a name of its own; an upgrade "
    "passes through this",
    "layout": "give both the same worker.kv_cache_dtype, worker.block_tokens, device and ranks, as the reason says",
    "failing": "let the prefill worker reach the decode worker's data port (worker.data_port, firewall, network "
    "policy, certificates); `baton doctor` tries transports on a machine",
}


class RosterMember(Protocol):
    """Describes a worker as the roster has it."""

    @property
    def info(self) -> WorkerInfo:
        """Returns what the worker is."""

    @property
    def load(self) -> WorkerLoad:
        """Returns what it last said of its load and its links."""


class Obstacle(msgspec.Struct, frozen=True):
    """Describes why prefill worker ``sender`` can't hand over to decode worker ``receiver``.

    One of them is "" where the other has no partner at all. ``cause`` is one of CAUSES.
    """

    sender: str
    receiver: str
    cause: str
    why: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns what stays the same for as long as it lasts, whatever the last error says."""
        return self.sender, self.receiver, self.cause

    @property
    def remedy(self) -> str:
        """Returns what an operator can do."""
        return REMEDIES[self.cause]

    def __str__(self) -> str:
        sender, receiver = self.sender or "no prefill worker", self.receiver or "any decode worker"
        return f"{sender} can't hand over to {receiver}: {self.why}"


def obstacles(workers: Iterable[RosterMember]) -> list[Obstacle]:
    """Returns what keeps ready workers of a model from handing over, sorted; at most MOST.

    A model whose workers have one role only has none.
    """
    models: dict[str, tuple[list[RosterMember], list[RosterMember]]] = {}
    for worker in workers:
        if worker.info.state == "ready" and worker.info.role in ("prefill", "decode"):
            models.setdefault(worker.info.model_id, ([], []))[worker.info.role == "decode"].append(worker)
    found = [o for pair in models.values() if all(pair) for o in (*_weights(*pair), *_pairs(*pair))]
    return sorted(found, key=lambda o: (o.cause, o.sender, o.receiver))[:MOST]


def _weights(prefill: list[RosterMember], decode: list[RosterMember]) -> Iterable[Obstacle]:
    """Yields workers whose weights no worker of the other role has."""
    sent, received = ({w.info.fingerprint for w in side} for side in (prefill, decode))
    for worker in prefill:
        if worker.info.fingerprint not in received:
            yield Obstacle(worker.info.worker_id, "", "weights", f"{_weights_of(worker)} no decode worker has")
    for worker in decode:
        if worker.info.fingerprint not in sent:
            yield Obstacle("", worker.info.worker_id, "weights", f"{_weights_of(worker)} no prefill worker has")


def _weights_of(worker: RosterMember) -> str:
    return f"its weights are {worker.info.fingerprint[:12]}, which"


def _pairs(prefill: list[RosterMember], decode: list[RosterMember]) -> Iterable[Obstacle]:
    """Yields pairs of the same weights whose layouts can't be brought together, or whose handoffs fail."""
    known: dict[tuple[KvLayout, KvLayout], str] = {}
    for first, second, failing in _all_pairs(prefill, decode):
        a, b = first.info, second.info
        if a.fingerprint != b.fingerprint:
            continue
        layouts = a.layout, b.layout
        why = known[layouts] if layouts in known else known.setdefault(layouts, obstacles_between(*layouts))
        if not why and bool(a.layout.windows) != bool(b.layout.windows) and not a.bridges_windows:
            why = "one has pages by window, the other of all layers, which the prefill worker's build can't convert"
        if why:
            yield Obstacle(a.worker_id, b.worker_id, "layout", why)
        elif why := failing.get(b.worker_id, ""):
            yield Obstacle(a.worker_id, b.worker_id, "failing", why)


def _all_pairs(
    prefill: list[RosterMember], decode: list[RosterMember]
) -> Iterable[tuple[RosterMember, RosterMember, Mapping[str, str]]]:
    """Yields each prefill worker with each decode worker, and why the former's handoffs fail, by decode worker."""
    for first in prefill:
        failing = _failing(first.load)
        for second in decode:
            yield first, second, failing


def _failing(load: WorkerLoad) -> Mapping[str, str]:
    return {pair.peer: pair.why for pair in load.kv_pairs if pair.why}


class Roster(Protocol):
    """Lists the workers of the cluster; ``cluster.holds.RosterWithHolds`` is one."""

    def snapshot(self) -> Mapping[str, RosterMember]:
        """Returns the workers by id, without waiting."""


class HandoverWatch:
    """Warns of obstacles in the log, each once for as long as it lasts, and counts them by cause."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._seen: frozenset[tuple[str, str, str]] = frozenset()
        self._told: frozenset[tuple[str, str, str]] = frozenset()
        self.counts: dict[str, int] = dict.fromkeys(CAUSES, 0)

    def look(self) -> None:
        """Reads the roster, and warns of what it shows now, showed at the last look, and wasn't told yet."""
        found = obstacles(self._roster.snapshot().values())
        self.counts = {cause: sum(o.cause == cause for o in found) for cause in CAUSES}
        lasting = [o for o in found if o.key in self._seen]
        for obstacle in lasting:
            if obstacle.key not in self._told:
                log.warning("%s; %s", obstacle, obstacle.remedy)
        self._seen, self._told = frozenset(o.key for o in found), frozenset(o.key for o in lasting)

    def count(self, cause: str) -> float:
        """Returns how many obstacles of ``cause`` the last look found."""
        return float(self.counts[cause])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Looks every EVERY_S seconds while entered."""
        async with beside(self._run, "handovers"):
            yield

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # requests don't need it
                log.exception("the workers' handovers could not be looked at")
                count_failure("handovers")
            await asyncio.sleep(EVERY_S)
