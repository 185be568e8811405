"""The load figures of an engine, from its Stats: for /metrics, and for the worker's membership entry.

Knows nothing of handoffs, tiers or the machine's energy. Stats are totals since the engine's start; Prometheus
counters take the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

from baton.cluster.metering.telemetry import WorkerMetrics
from baton.cost.fit import AdaptedStepFit
from baton.protos.channel import Stats
from baton.protos.measurements import EngineWork, ExpertCopies, ExpertLoad, SpeculationTotals, WorkerLoad
from baton.protos.nouns import WorkerInfo
from baton.worker.figures.rates import BUSY, Rates, bytes_read, flops, work_totals

TOTALS = {
    "step": "steps",
    "tokens_prefilled": "prefill_tokens",
    "tokens_decoded": "decode_tokens",
    "prefix_hit_tokens": "prefix_hits",
    "prefix_asked_tokens": "prefix_queries",
    "preemptions": "preemptions",
    "leases_swept": "leases_swept",
    "steps_ahead": "steps_ahead",
    "rows_discarded": "rows_discarded",
    "busy_seconds": "busy_seconds",
    "drafts": "drafts",
    "draft_tokens": "draft_tokens",
    "draft_tokens_accepted": "draft_tokens_accepted",
    "draft_seconds": "draft_seconds",
}


_TOTALS_OF = attrgetter(*TOTALS)
ARMS = ("drafts", "control")  # steps that may draft, and the share that may not


class EngineFigures:
    """Keeps the latest Stats of one role, and rates over the last seconds.

    ``work`` is the cost of a step and the machine's peaks, None if not measured; ``fit`` learns step times, and
    outlives the role.
    """

    def __init__(
        self,
        metrics: WorkerMetrics,
        info: WorkerInfo,
        work: EngineWork | None,
        fit: AdaptedStepFit,
        clock: Callable[[], float],
    ) -> None:
        self.pages = info.pages
        self._metrics, self._work, self._fit = metrics, work, fit
        self._max_batch = max(1, info.max_batch)
        self._rates = Rates(clock)
        self._rates.now({})
        self._last: Stats | None = None
        self._counted: tuple[float, ...] = (0,) * len(TOTALS)  # totals at the last Stats
        self._show_ceilings()

    def observe(self, now: Stats) -> None:
        """Takes the engine's newest Stats into metrics, rates and the fit of step times."""
        totals = _TOTALS_OF(now)
        for name, total, before in zip(TOTALS.values(), totals, self._counted, strict=True):
            if total != before:
                getattr(self._metrics, name).inc(total - before)
        self._counted = totals
        self._count_work(now)
        if now.speculation is not None:
            self._count_speculation(now.speculation, self._last.speculation if self._last else None)
        if now.expert_load is not None:
            self._count_experts(now.expert_load, self._last.expert_load if self._last else None)
        self._rates.now(work_totals(now, self._work))
        self._show_gauges(now)
        for sample in now.samples:
            self._fit.observe(sample)
        self._show_adapters()
        self._last = now

    def _show_adapters(self) -> None:
        if (curve := self._fit.adapters) is not None:
            self._metrics.optional("adapter_row_seconds").set(curve.row * curve.rank)
            self._metrics.optional("adapter_seconds").set(curve.adapter * curve.rank)

    def load(self) -> WorkerLoad | None:
        """Returns the engine's part of the worker's load; None before the first Stats."""
        last = self._last
        if last is None:
            return None
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
            step_curve=self._fit.curve,
            prefill_tokens_per_s=rates.get("prefill_tokens", 0.0),
            decode_tokens_per_s=rates.get("decode_tokens", 0.0),
            busy=min(1.0, rates.get(BUSY, 0.0)),
            prefix_hits=last.prefix_hit_tokens,
            prefix_queries=last.prefix_asked_tokens,
            preemptions=last.preemptions,
            mfu=mfu,
            mbu=mbu,
            speculation=last.speculation,
            adapter_curve=self._fit.adapters,
            bare_curve=self._fit.bare,
        )

    def _count_speculation(self, now: SpeculationTotals, last: SpeculationTotals | None) -> None:
        before = last or SpeculationTotals(judged=(0,) * len(now.judged), accepted=(0,) * len(now.accepted))
        self._metrics.optional("sequence_steps").inc(now.sequence_steps - before.sequence_steps)
        self._metrics.optional("draft_read_ahead").inc(now.read_ahead - before.read_ahead)
        for at, counts in enumerate(zip(now.judged, before.judged, now.accepted, before.accepted, strict=True)):
            self._metrics.judged(at, counts[0] - counts[1], counts[2] - counts[3])
        for at, arm in enumerate(ARMS):
            tokens, seconds = now.tokens[at] - before.tokens[at], now.seconds[at] - before.seconds[at]
            self._metrics.compared(arm, tokens, seconds)

    def _count_experts(self, now: ExpertLoad, last: ExpertLoad | None) -> None:
        before = last.rows if last else (0,) * len(now.rows)
        for rank, (rows, earlier) in enumerate(zip(now.rows, before, strict=True)):
            self._metrics.experts_computed(rank, rows - earlier)
        self._metrics.optional("expert_imbalance").set(now.imbalance)
        if now.copies.imbalance_at_home:
            shown = last is not None and last.copies.imbalance_at_home  # else none of the moves was counted yet
            self._show_copies(now.copies, last.copies if last is not None and shown else ExpertCopies())

    def _show_copies(self, now: ExpertCopies, last: ExpertCopies) -> None:
        self._metrics.optional("expert_copies").set(now.copies)
        self._metrics.optional("expert_moves").inc(now.moves - last.moves)
        self._metrics.experts_placed("placed", now.imbalance)
        self._metrics.experts_placed("home", now.imbalance_at_home)

    def _utilisation(self, rates: Mapping[str, float]) -> tuple[float | None, float | None]:
        """MFU and MBU of the last seconds, shown too; None where no ceiling was measured."""
        work = self._work
        if work is None or not work.peak_flops or not work.peak_bytes:
            return None, None
        mfu, mbu = rates.get("flops", 0.0) / work.peak_flops, rates.get("bytes", 0.0) / work.peak_bytes
        self._metrics.optional("mfu").set(mfu)
        self._metrics.optional("mbu").set(mbu)
        return mfu, mbu

    def _show_ceilings(self) -> None:
        if self._work is not None:
            self._metrics.optional("peak_flops").set(self._work.peak_flops)
            self._metrics.optional("peak_bytes").set(self._work.peak_bytes)

    def _count_work(self, now: Stats) -> None:
        work, last = self._work, self._last
        if work is not None:
            before = (flops(last, work), bytes_read(last, work)) if last else (0.0, 0.0)
            self._metrics.optional("flops").inc(max(0.0, flops(now, work) - before[0]))
            self._metrics.optional("bytes_read").inc(max(0.0, bytes_read(now, work) - before[1]))

    def _show_gauges(self, now: Stats) -> None:
        m, unused = self._metrics, now.free_pages + now.cached_pages
        m.running.set(now.running)
        m.batch_fill.set(now.running / self._max_batch)
        m.waiting.set(now.waiting)
        m.waiting_tokens.set(now.waiting_tokens)
        m.step_seconds.set(now.step_seconds_p50)
        m.cache_usage.set((self.pages - unused) / self.pages)
        quarantined = self.pages - unused - now.leased_pages
        states = {"free": now.free_pages, "cached": now.cached_pages, "leased": now.leased_pages}
        for state, pages in {**states, "quarantined": quarantined}.items():
            m.pages(state).set(pages)
