"""What answers add to the router's metrics, as a client sees them: seconds from arrival, tokens, outcomes.

Knows nothing of workers; times are by the router's own clock. One choice counts as one request.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.cluster.telemetry import RouterMetrics
from baton.router.request import Summary

_OWN_METRIC = "ttft"  # the one station that has a histogram of its own


class Meter:
    """Measures one choice. ``took`` for each piece, ``ended`` once at its end; later calls do nothing.

    ``record`` is told, at the end, of seconds since arrival and of tokens.
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
    ) -> None:
        self._metrics, self._clock, self._arrived, self._summary = metrics, clock, arrived, summary
        self._labels = (model_id, summary.context_class)
        self._counts_prompt = counts_prompt
        self._record = record
        self._tokens = 0
        self._first_at = self._last_at = 0.0
        self._open = True

    def took(self, tokens: int) -> None:
        """``tokens`` more arrived, together."""
        now = self._clock()
        if self._tokens == 0:
            self._first_at = now
            self._metrics.ttft.labels(*self._labels).observe(now - self._arrived)
        else:
            gaps = self._metrics.itl.labels(*self._labels)
            for _ in range(tokens):
                gaps.observe((now - self._last_at) / tokens)
        self._tokens += tokens
        self._last_at = now

    def ended(self, outcome: str) -> None:
        """``outcome``: a finish_reason, an error label or "cancelled"."""
        if not self._open:
            return
        self._open = False
        metrics, labels = self._metrics, self._labels
        metrics.requests.labels(*labels, outcome).inc()
        metrics.output_tokens.labels(*labels).inc(self._tokens)
        metrics.duration.labels(*labels).observe(self._clock() - self._arrived)
        if self._tokens > 1:
            metrics.tpot.labels(*labels).observe((self._last_at - self._first_at) / (self._tokens - 1))
        if self._counts_prompt:
            self._count_prompt()
        if self._record is not None:
            self._record(self._clock() - self._arrived, self._tokens)
        for station, seconds in self._summary.stations.items():
            if station != _OWN_METRIC:
                metrics.station.labels(*labels, station).observe(seconds)

    def _count_prompt(self) -> None:
        metrics, labels = self._metrics, self._labels
        metrics.prompt_tokens.labels(*labels).inc(self._summary.prompt_tokens)
        metrics.cached_tokens.labels(*labels).inc(self._summary.cached_tokens)
        metrics.prompt_length.labels(*labels).observe(self._summary.prompt_tokens)
