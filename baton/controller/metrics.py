"""The controller's Prometheus metrics: its decisions, the age of its advice, the roles' pressure, prediction
errors.

Knows nothing of how a decision is made. Only the router that leads sets gauges: two would disagree.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.cluster.advice import Advice
from baton.cluster.metering.telemetry import RouterMetrics

FIGURES = ("ttft", "tpot", "throughput")


class ControlMetrics:
    """Sets the controller's metrics; ``clock`` is that of the advice, in Unix seconds."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self._metrics, self._clock = metrics, clock
        self._gauges = (metrics.control_age, metrics.control_pressure, metrics.control_error)

    def looked(self, advice: Advice, kinds: tuple[str, ...]) -> None:
        """Counts a look's decision ``kinds`` and sets the gauges by its advice."""
        for kind in kinds:
            self._metrics.control_decisions.labels(kind).inc()
        self.left()
        self._metrics.control_age.labels(advice.mode).set_function(lambda: max(0.0, self._clock() - advice.at))
        for role, pressure in zip(("prefill", "decode"), advice.pressure or (), strict=False):
            self._metrics.control_pressure.labels(role).set(pressure)
        for figure in FIGURES:
            error = getattr(advice.twin_error, figure)
            if error is not None:
                self._metrics.control_error.labels(figure).set(error)

    def failed(self) -> None:
        """Counts a change of roles or workers that failed."""
        self._metrics.control_decisions.labels("failed").inc()

    def left(self) -> None:
        """Clears the gauges, as another router leads or their values are unknown."""
        for gauge in self._gauges:
            gauge.clear()
