"""A worker's report of its load: Prometheus metrics, and the load in its membership entry.

Knows nothing of Redis or HTTP. Each part owns its figures; what was learned of the machine outlives a role.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from socket import gethostname
from typing import NamedTuple

import msgspec

from baton.cluster.metering.telemetry import WorkerMetrics
from baton.cost.fit import AdaptedStepFit, TransferFit
from baton.kv.exchange.filling import FillReport
from baton.kv.tiers.shared import SharedTier
from baton.kv.tiers.slab import Slab
from baton.protos.measurements import EngineWork, WorkerLoad
from baton.protos.nouns import WorkerInfo
from baton.worker.figures.energy import Energy
from baton.worker.figures.engine import EngineFigures
from baton.worker.figures.rates import Rates
from baton.worker.figures.transfer import TransferFigures

TIER_EVENTS = ("stored", "loaded", "evicted", "damaged", "failed")


class Machine(NamedTuple):
    """Holds what is known of the machine, independent of the worker's role: energy counters, and fits of step,
    handoff and fetch times.

    ``work`` is the cost of a step and the machine's peaks, None if not measured. ``tiers`` has the lower tiers'
    totals so far, by name, which some role's metrics have counted.
    """

    work: EngineWork | None
    energy: Energy
    steps: AdaptedStepFit
    transfers: TransferFit
    fetches: TransferFit
    tiers: dict[str, Counter[str]]

    @classmethod
    def unknown(cls, work: EngineWork | None) -> Machine:
        """Returns a machine of which only ``work`` is known so far."""
        return cls(work, Energy(), AdaptedStepFit(), TransferFit(), TransferFit(), {})


class WorkerReport:
    """Holds the figures of one role: its engine, its KV handoffs, its lower tiers and the machine's power."""

    def __init__(
        self,
        info: WorkerInfo,
        metrics: WorkerMetrics,
        machine: Machine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics
        self.engine = EngineFigures(metrics, info, machine.work, machine.steps, clock)
        self.transfers = TransferFigures(metrics, machine.transfers, clock)
        self._machine = machine
        self._tiers = _TierCounts(metrics, machine.tiers)
        self._power = _Power(metrics, machine.energy, clock)

    def fetched(self, report: FillReport) -> None:
        """Counts blocks that were fetched from another worker."""
        self.metrics.fetched_blocks.inc(report.blocks)
        self.metrics.fetched_bytes.inc(report.bytes)
        self._machine.fetches.observe(report.bytes, report.seconds)

    def tiers(self, tiers: Mapping[str, Slab | SharedTier]) -> None:
        """Exports the counts of the lower tiers, by name."""
        for name, tier in tiers.items():
            self._tiers.show(name, tier)

    def load(self) -> WorkerLoad:
        """Returns the worker's present load, for its membership entry."""
        links, watts = self.transfers.links, self._power.watts()
        load = self.engine.load()
        if load is None:
            return WorkerLoad(free_pages=self.engine.pages, kv_links=links, watts=watts)
        return msgspec.structs.replace(
            load,
            transfer_curve=self._machine.transfers.curve,
            kv_links=links,
            fetch_curve=self._machine.fetches.curve,
            kv_pairs=self.transfers.pairs,
            watts=watts,
        )


class _TierCounts:
    """Counters of the lower tiers, which outlive roles: their totals come, differences from ``counted`` are
    counted.
    """

    def __init__(self, metrics: WorkerMetrics, counted: dict[str, Counter[str]]) -> None:
        self._metrics, self._before = metrics, counted

    def show(self, name: str, tier: Slab | SharedTier) -> None:
        before = self._before.setdefault(name, Counter())
        now = Counter({event: getattr(tier, event) for event in TIER_EVENTS})
        for event in now:
            self._metrics.tier_events(name, event).inc(now[event] - before[event])
        self._metrics.tier_blocks(name).set(len(tier))
        self._before[name] = now


class _Power:
    """The machine's energy since this was made, and its watts over the last seconds."""

    def __init__(self, metrics: WorkerMetrics, energy: Energy, clock: Callable[[], float]) -> None:
        self._metrics, self._energy, self._rates = metrics, energy, Rates(clock)
        self._before = energy.joules()

    def watts(self) -> float | None:
        """Returns watts over the last seconds, and counts joules; None where the machine doesn't tell."""
        joules, host = self._energy.joules(), gethostname()
        for source, total in joules.items():
            self._metrics.energy(host, source).inc(max(0.0, total - self._before.get(source, 0.0)))
        self._before = joules
        if not joules:
            return None
        self._rates.now(joules)
        return sum(self._rates.per_second().values()) or None
