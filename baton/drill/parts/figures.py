"""Makes what a simulated worker's figures consist of: metrics of its own, and a machine without meters.

Knows nothing of workers.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.cluster.metering.telemetry import WorkerMetrics
from baton.cost.fit import AdaptedStepFit, TransferFit
from baton.protos.nouns import WorkerInfo
from baton.worker.figures.report import Machine


class NoEnergy:
    """An energy meter of a machine that has none."""

    def joules(self) -> dict[str, float]:
        """Returns {}, because a simulated machine has no meter."""
        return {}


def metrics_of(info: WorkerInfo) -> WorkerMetrics:
    """Returns new metrics, in a registry of their own, of the worker that ``info`` describes."""
    return WorkerMetrics(CollectorRegistry(), info.role, info.worker_id, info.model_id)


def meterless_machine() -> Machine:
    """Returns a machine of which nothing has been measured."""
    return Machine(None, NoEnergy(), AdaptedStepFit(), TransferFit(), TransferFit(), {})  # type: ignore[arg-type]
