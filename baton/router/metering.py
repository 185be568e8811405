"""What answers add to the router's metrics, as a client sees them: seconds from arrival, tokens, outcomes, SLOs.

Knows nothing of workers; times are by the router's own clock. One choice counts as one request. A piece of several
tokens costs what a piece of one does, which is two additions: what a choice counted is merged into the metrics
when it ends, and every ``MERGE_S`` before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from baton.cluster.telemetry import RouterMetrics, exemplar
from baton.router.gaps import Gaps
from baton.router.live import GOOD_ENDS, Bins, Ended, verdict
from baton.router.request import Summary

MERGE_S = 0.25
_OWN_METRIC = "ttft"  # the one station that has a histogram of its own


class Meter:
    """Measures one choice. ``took`` for each piece, ``ended`` once at its end; later calls do nothing.

    ``record`` is told, at the end, of seconds since arrival and of tokens; ``tell`` of all there is to know.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        arrived: float,
        model_id: str,
        summary: Summary,
        counts_prompt: bool,
        record: Callable[[float, int], None] | None = None,
        tell: Callable[[Ended, Bins], None] | None = None,
        request_id: str = "",
        wall_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._metrics, self._clock, self._arrived, self._summary = metrics, clock, arrived, summary
        self._labels = (model_id, summary.context_class)
        self._counts_prompt = counts_prompt
        self._record, self._tell = record, tell
        self._request_id, self._wall_clock = request_id, wall_clock
        self._tokens = 0
        self._first_at = self._last_at = self._longest_gap = 0.0
        self._merged_at = 0.0
        self._gaps, self._bins = Gaps(), Bins()
        self._open = True

    def took(self, tokens: int) -> None:
        """``tokens`` more arrived, together."""
        now = self._clock()
        if self._tokens == 0:
            self._first_at = self._merged_at = now
            trace = exemplar(self._summary.trace_id)
            self._metrics.ttft.labels(*self._labels).observe(now - self._arrived, trace)
        elif tokens:
            gap = now - self._last_at
            self._gaps.count(gap, tokens)
            if gap > self._longest_gap:
                self._longest_gap = gap
            if now - self._merged_at > MERGE_S:
                self._merge(now)
        self._tokens += tokens
        self._last_at = now

    def _merge(self, now: float) -> None:
        self._merged_at = now
        buckets, seconds = self._gaps.drain(self._bins)
        if buckets:
            self._metrics.itl.labels(*self._labels).observe_many(buckets, seconds)

    def ended(self, outcome: str) -> None:
        """``outcome``: a finish_reason, an error label or "cancelled"."""
        if not self._open:
            return
        self._open = False
        self._merge(self._last_at)
        over = self._over(outcome)
        self._count(over)
        if self._record is not None:
            self._record(over.duration_s, self._tokens)
        if self._tell is not None:
            self._tell(over, self._bins)

    def _over(self, outcome: str) -> Ended:
        summary, tokens = self._summary, self._tokens
        ttft = self._first_at - self._arrived if tokens else None
        tpot = (self._last_at - self._first_at) / (tokens - 1) if tokens > 1 else None
        slos = summary.slo_ttft_s, summary.slo_tpot_s
        return Ended(
            at=self._wall_clock(),
            request_id=self._request_id,
            model=self._labels[0],
            context_class=summary.context_class,
            outcome=outcome,
            way=summary.way,
            prefill=summary.prefill_worker,
            decode=summary.decode_worker,
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=summary.cached_tokens,
            output_tokens=tokens,
            duration_s=self._clock() - self._arrived,
            ttft_s=ttft,
            tpot_s=tpot,
            longest_gap_s=self._longest_gap,
            stations=dict(summary.stations),
            slo_ttft_s=slos[0],
            slo_tpot_s=slos[1],
            verdict="" if outcome == "cancelled" else verdict(ttft, tpot, *slos, outcome in GOOD_ENDS),
        )

    def _count(self, over: Ended) -> None:
        metrics, labels, trace = self._metrics, self._labels, exemplar(self._summary.trace_id)
        metrics.requests.labels(*labels, over.outcome).inc()
        metrics.output_tokens.labels(*labels).inc(self._tokens)
        metrics.output_length.labels(*labels).observe(self._tokens)
        metrics.duration.labels(*labels).observe(over.duration_s, trace)
        if over.tpot_s is not None:
            metrics.tpot.labels(*labels).observe(over.tpot_s, trace)
            metrics.longest_gap.labels(*labels).observe(over.longest_gap_s, trace)
        if self._counts_prompt:
            self._count_prompt()
        if over.verdict:
            self._judge(over)
        for station, seconds in over.stations.items():
            if station != _OWN_METRIC:
                metrics.station.labels(*labels, station).observe(seconds, trace)

    def _judge(self, over: Ended) -> None:
        judged = partial(verdict, over.ttft_s, over.tpot_s, ok=over.outcome in GOOD_ENDS)
        each = {"ttft": judged(over.slo_ttft_s, 0.0), "tpot": judged(0.0, over.slo_tpot_s), "all": over.verdict}
        for slo, found in each.items():
            if found:
                self._metrics.slo.labels(*self._labels, slo, found).inc()

    def _count_prompt(self) -> None:
        metrics, labels = self._metrics, self._labels
        metrics.prompt_tokens.labels(*labels).inc(self._summary.prompt_tokens)
        metrics.cached_tokens.labels(*labels).inc(self._summary.cached_tokens)
        metrics.prompt_length.labels(*labels).observe(self._summary.prompt_tokens)
