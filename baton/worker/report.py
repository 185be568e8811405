"""What a worker tells the world about its load: Prometheus metrics, and the load in its membership entry.

Knows nothing of Redis or HTTP. The engine's Stats are totals; Prometheus counters take the differences.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from socket import gethostname

from prometheus_client import CollectorRegistry

from baton.cluster.telemetry import WorkerMetrics
from baton.cost.fit import StepFit, TransferFit
from baton.kv.exchange.filling import FillReport
from baton.kv.tiers.stack import Tier
from baton.prefill_worker.io.handoff import HandoffReport
from baton.process.security import show_end
from baton.protos.channel import Stats
from baton.protos.nouns import EngineWork, KvLink, KvPair, WorkerInfo, WorkerLoad
from baton.worker.energy import Energy
from baton.worker.rates import Rates, bytes_read, done, flops
from baton.worker.spec import WorkerSpec

TOTALS = {
    "step": "steps",
    "tokens_prefilled": "prefill_tokens",
    "tokens_decoded": "decode_tokens",
    "prefix_hit_tokens": "prefix_hits",
    "prefix_asked_tokens": "prefix_queries",
    "preemptions": "preemptions",
    "leases_swept": "leases_swept",
    "busy_seconds": "busy_seconds",
    "drafts": "drafts",
    "draft_tokens": "draft_tokens",
    "draft_tokens_accepted": "draft_tokens_accepted",
    "draft_seconds": "draft_seconds",
}
TIER_EVENTS = ("stored", "loaded", "evicted", "damaged", "failed")
UNKNOWN = "unknown"  # a peer that was never reached


class WorkerReport:
    """The latest figures of one worker. ``work``: what its steps cost, where that was measured."""

    def __init__(
        self,
        info: WorkerInfo,
        earlier: WorkerReport | None = None,
        spec: WorkerSpec | None = None,
        work: EngineWork | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.registry = CollectorRegistry()
        self.spec: WorkerSpec | None = spec or (earlier.spec if earlier else None)
        vllm, enabled = (self.spec.observe.vllm_names, self.spec.observe.telemetry) if self.spec else (False, True)
        self.metrics = WorkerMetrics(self.registry, info.role, info.worker_id, info.model_id, vllm, enabled)
        self._pages, self._max_batch = info.pages, max(1, info.max_batch)
        self._work: EngineWork | None = work or (earlier._work if earlier else None)
        self._clock, self._rates, self._pair_rates = clock, Rates(clock), Rates(clock)
        self._energy: Energy = earlier._energy if earlier else Energy()
        self._joules: dict[str, float] = self._energy.joules()
        self._power = Rates(clock)
        self._pairs: dict[str, KvPair] = {}
        for rates in (self._rates, self._pair_rates):
            rates.now({})
        self._last: Stats | None = None
        self._ceilings()
        if self.spec is not None and self.spec.server.tls is not None:
            show_end(self.spec.server.tls, self.metrics.optional("certificate"))
        self._steps, self._transfers, self._fetches = StepFit(), TransferFit(), TransferFit()
        if earlier is not None:  # of the role before: the machine is the same, so what was learned of it holds
            self._steps, self._transfers, self._fetches = earlier._steps, earlier._transfers, earlier._fetches
        self._refused: Counter[str] = Counter()
        self._tiered: dict[str, Counter[str]] = {}
        self._links: dict[str, KvLink] = {}

    def stats(self, now: Stats) -> None:
        """The engine's figures, up to ten times a second."""
        for field, name in TOTALS.items():
            before = 0 if self._last is None else getattr(self._last, field)
            getattr(self.metrics, name).inc(getattr(now, field) - before)
        self._count_work(now)
        self._rates.now(done(now, self._work))
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

    def shipped(self, peer: str, shipped_bytes: int) -> None:
        """One handoff to ``peer`` is complete."""
        peer = peer or UNKNOWN
        self.metrics.transferred(peer, "ok", shipped_bytes)
        old = self._pairs.get(peer, KvPair(peer))
        self._pairs[peer] = KvPair(peer, old.transfers + 1, old.failures, old.bytes + shipped_bytes)
        self._pair_rates.now({pair.peer: pair.bytes for pair in self._pairs.values()})

    def failed(self, peer: str, error_label: str) -> None:
        """One handoff to ``peer`` came to nothing."""
        peer = peer or UNKNOWN
        self.metrics.transferred(peer, error_label)
        old = self._pairs.get(peer, KvPair(peer))
        self._pairs[peer] = KvPair(peer, old.transfers, old.failures + 1, old.bytes)

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
            now = Counter({event: getattr(slab, event) for event in TIER_EVENTS})
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
        links, watts = tuple(self._links.values()), self._watts()
        if last is None:
            return WorkerLoad(free_pages=self._pages, kv_links=links, watts=watts)
        rates = self._rates.per_second()
        mfu, mbu = self._utilisation(rates)
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
            kv_pairs=self._shown_pairs(),
            prefill_tokens_per_s=rates.get("prefill_tokens", 0.0),
            decode_tokens_per_s=rates.get("decode_tokens", 0.0),
            busy=min(1.0, rates.get("busy", 0.0)),
            prefix_hits=last.prefix_hit_tokens,
            prefix_queries=last.prefix_asked_tokens,
            preemptions=last.preemptions,
            mfu=mfu,
            mbu=mbu,
            watts=watts,
        )

    def _shown_pairs(self) -> tuple[KvPair, ...]:
        rates = self._pair_rates.per_second()
        return tuple(
            KvPair(p.peer, p.transfers, p.failures, p.bytes, rates.get(p.peer, 0.0)) for p in self._pairs.values()
        )

    def _utilisation(self, rates: Mapping[str, float]) -> tuple[float | None, float | None]:
        """MFU and MBU of the last seconds, shown too; None where no ceiling was measured."""
        work = self._work
        if work is None or not work.peak_flops or not work.peak_bytes:
            return None, None
        mfu, mbu = rates.get("flops", 0.0) / work.peak_flops, rates.get("bytes", 0.0) / work.peak_bytes
        self.metrics.optional("mfu").set(mfu)
        self.metrics.optional("mbu").set(mbu)
        return mfu, mbu

    def _ceilings(self) -> None:
        if self._work is not None:
            self.metrics.optional("peak_flops").set(self._work.peak_flops)
            self.metrics.optional("peak_bytes").set(self._work.peak_bytes)

    def _count_work(self, now: Stats) -> None:
        work, last = self._work, self._last
        if work is not None:
            before = (flops(last, work), bytes_read(last, work)) if last else (0.0, 0.0)
            self.metrics.optional("flops").inc(max(0.0, flops(now, work) - before[0]))
            self.metrics.optional("bytes_read").inc(max(0.0, bytes_read(now, work) - before[1]))

    def _watts(self) -> float | None:
        """Of the machine, over the last seconds; None where it doesn't tell."""
        joules, host = self._energy.joules(), gethostname()
        for source, total in joules.items():
            self.metrics.energy(host, source).inc(max(0.0, total - self._joules.get(source, 0.0)))
        self._joules = joules
        if not joules:
            return None
        self._power.now(joules)
        return sum(self._power.per_second().values()) or None

    def _gauges(self, now: Stats) -> None:
        m, unused = self.metrics, now.free_pages + now.cached_pages
        m.running.set(now.running)
        m.batch_fill.set(now.running / self._max_batch)
        m.waiting.set(now.waiting)
        m.waiting_tokens.set(now.waiting_tokens)
        m.step_seconds.set(now.step_seconds_p50)
        m.cache_usage.set((self._pages - unused) / self._pages)
        quarantined = self._pages - unused - now.leased_pages
        states = {"free": now.free_pages, "cached": now.cached_pages, "leased": now.leased_pages}
        for state, pages in {**states, "quarantined": quarantined}.items():
            m.pages(state).set(pages)
