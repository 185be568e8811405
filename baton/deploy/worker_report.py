"""What a worker tells the world about its load: Prometheus metrics, and the load in its membership entry.

Knows nothing of Redis or HTTP. The engine's Stats are totals; Prometheus counters take the differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from baton.cluster.telemetry import WorkerMetrics
from baton.cost.fit import StepFit, TransferFit
from baton.kv.filling import FillReport
from baton.kv.tiers.stack import Tier
from baton.prefill_worker.handoff import HandoffReport
from baton.protos.channel import Stats
from baton.protos.nouns import KvLink, WorkerInfo, WorkerLoad

TOTALS = {
    "step": "steps",
    "tokens_prefilled": "prefill_tokens",
    "tokens_decoded": "decode_tokens",
    "prefix_hit_tokens": "prefix_hits",
    "prefix_asked_tokens": "prefix_queries",
    "preemptions": "preemptions",
    "leases_swept": "leases_swept",
}


class WorkerReport:
    """The latest figures of one worker."""

    def __init__(self, info: WorkerInfo):
        self.registry = CollectorRegistry()
        self.metrics = WorkerMetrics(self.registry, info.role, info.worker_id, info.model_id)
        self._pages = info.pages
        self._last: Stats | None = None
        self._steps, self._transfers, self._fetches = StepFit(), TransferFit(), TransferFit()
        self._refused: Counter[str] = Counter()
        self._tiered: dict[str, Counter[str]] = {}
        self._links: dict[str, KvLink] = {}

    def stats(self, now: Stats) -> None:
        """The engine's figures, up to ten times a second."""
        for field, name in TOTALS.items():
            before = 0 if self._last is None else getattr(self._last, field)
            getattr(self.metrics, name).inc(getattr(now, field) - before)
        self._gauges(now)
        for sample in now.samples:
            self._steps.observe(sample)
        self._last = now

    def handoff(self, report: HandoffReport) -> None:
        """One handoff is complete."""
        self.metrics.transfer_blocks.inc(report.shipped_blocks)
        self.metrics.transfer_bytes.inc(report.shipped_bytes)
        self.metrics.transfer_seconds.observe(report.exposed_s)
        if report.shipped_bytes:
            self._transfers.observe(report.shipped_bytes, report.busy_s)

    def fetched(self, report: FillReport) -> None:
        """Blocks came from another worker."""
        self.metrics.fetched_blocks.inc(report.blocks)
        self.metrics.fetched_bytes.inc(report.bytes)
        self._fetches.observe(report.bytes, report.seconds)

    def link(self, link: KvLink, reason: str) -> None:
        """A preflight chose how KV gets to a decode worker; ``reason`` tells why not the best way, or is empty."""
        self.metrics.linked(link.peer, link.transport, link.bytes_per_s, reason)
        self._links[link.peer] = link

    def tiers(self, tiers: Sequence[Tier]) -> None:
        """The lower tiers' totals."""
        for tier in tiers:
            slab, before = tier.slab, self._tiered.setdefault(tier.name, Counter())
            now = Counter(stored=slab.stored, loaded=slab.loaded, evicted=slab.evicted, damaged=slab.damaged)
            for event in now:
                self.metrics.tier_events(tier.name, event).inc(now[event] - before[event])
            self.metrics.tier_blocks(tier.name).set(len(slab))
            self._tiered[tier.name] = now

    def refusals(self, totals: Counter[str]) -> None:
        """Handoff frames refused since start, by error label."""
        for label, count in (totals - self._refused).items():
            for _ in range(count):
                self.metrics.refused(label)
        self._refused = Counter(totals)

    def load(self) -> WorkerLoad:
        """For the membership entry."""
        last = self._last
        links = tuple(self._links.values())
        if last is None:
            return WorkerLoad(free_pages=self._pages, kv_links=links)
        return WorkerLoad(
            running=last.running,
            waiting=last.waiting,
            waiting_tokens=last.waiting_tokens,
            free_pages=last.free_pages,
            cached_pages=last.cached_pages,
            leased_pages=last.leased_pages,
            steps=last.step,
            step_curve=self._steps.curve,
            transfer_curve=self._transfers.curve,
            kv_links=links,
            fetch_curve=self._fetches.curve,
        )

    def _gauges(self, now: Stats) -> None:
        m, unused = self.metrics, now.free_pages + now.cached_pages
        m.running.set(now.running)
        m.waiting.set(now.waiting)
        m.waiting_tokens.set(now.waiting_tokens)
        m.step_seconds.set(now.step_seconds_p50)
        m.cache_usage.set((self._pages - unused) / self._pages)
        quarantined = self._pages - unused - now.leased_pages
        states = {"free": now.free_pages, "cached": now.cached_pages, "leased": now.leased_pages}
        for state, pages in {**states, "quarantined": quarantined}.items():
            m.pages(state).set(pages)
