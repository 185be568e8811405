"""Metrics of requests on LoRA adapters.

Knows nothing of how adapters are loaded. A label's values stay for the process's life, and adapters come and go:
after the first MOST_NAMES names all others are counted as "other".
"""

from __future__ import annotations

from collections.abc import Callable, Sized

from baton.cluster.metering.telemetry import RouterMetrics
from baton.protos.adapter_id import name_of
from baton.router.request.request import ChoiceSummary, RouterRequest

MOST_NAMES = 64  # values of the label ``adapter``
OTHER, UNFINISHED = "other", "unfinished"


class AdapterCounts:
    """Counts requests and tokens per adapter as choices end; ``served`` returns the adapters that clients may
    name.
    """

    def __init__(self, metrics: RouterMetrics, served: Callable[[], Sized]) -> None:
        self._metrics = metrics
        self._names: set[str] = set()
        metrics.adapters_served.set_function(lambda: len(served()))

    def ended(self, request: RouterRequest, summary: ChoiceSummary) -> None:
        """Counts one choice that has ended, if it was on an adapter; a request counts by its first choice."""
        if not request.context.adapter_id:
            return
        name = self._label(name_of(request.context.adapter_id))
        if summary.choice == 0:
            outcome = summary.finish_reason or UNFINISHED
            self._metrics.adapter_requests.labels(request.model_id, name, outcome).inc()
        self._metrics.adapter_tokens.labels(request.model_id, name).inc(summary.completion_tokens)

    def _label(self, name: str) -> str:
        if name not in self._names and len(self._names) >= MOST_NAMES:
            return OTHER
        self._names.add(name)
        return name
