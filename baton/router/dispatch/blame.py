"""Consequences of a worker's failure for a request: ask the worker again later, try another one, or give up.

Knows nothing of connections or queues; dispatch carries the verdict out.
"""

from __future__ import annotations

import logging

from baton.cluster.metering.telemetry import RouterMetrics
from baton.protos.errors import (
    AdapterNotLoaded,
    AdaptersFull,
    BatonError,
    Draining,
    NoWorker,
    Overloaded,
    RequestBlamed,
    WorkerLost,
    WorkerStalled,
)
from baton.router.dispatch.choice_run import ChoiceRun
from baton.router.dispatch.view import ClusterView

log = logging.getLogger("baton.router")


class Overdue(WorkerLost):
    """Says that a prefill took much longer than predicted, so that another worker is tried."""

    label = "overdue"


MOST_MISSES = 16  # adapters that were evicted before their request came; more, and they only push each other out
MOST_SUSPECTED = 2  # stalled workers: one may be the worker's own fault, or a neighbour's


class Blame:
    """Judges what workers' failures mean for a choice.

    ``max_attempts`` limits failures per choice; a worker without room is offered no request for ``full_wait_s``
    seconds.
    """

    def __init__(self, view: ClusterView, metrics: RouterMetrics, max_attempts: int, full_wait_s: float) -> None:
        self._view, self._metrics = view, metrics
        self._max_attempts, self._full_wait_s = max_attempts, full_wait_s

    def __call__(self, run: ChoiceRun, worker_id: str, error: BatonError, refused: bool) -> None:
        """Judges the failure ``error`` of worker ``worker_id``; returns if the choice is to be placed again.

        ``refused``: the worker didn't take the request; without room it may be asked again later, otherwise another
        worker is tried. Raises ``error`` if trying again can't help or was tried often enough, RequestBlamed for a
        request that stalls engines.
        """
        if refused and isinstance(error, Overloaded | Draining) and not isinstance(error, AdaptersFull):
            self._view.full(worker_id, self._full_wait_s)
            return
        run.leave(worker_id, error)
        if isinstance(error, NoWorker):
            return  # nobody failed: the way that was planned is closed, another may be open
        if isinstance(error, AdapterNotLoaded) and run.retries.misses < MOST_MISSES:
            run.retries.miss()
            return  # nor here: others' adapters took its place between the load and the request
        if isinstance(error, Draining | Overdue):
            run.retries.move()  # nor did one that was asked to leave, or is slow
        else:
            run.retries.fail()
            _suspect(run, error)
            if not error.retryable or run.retries.failures >= self._max_attempts:
                raise error
            log.info("%s goes elsewhere than %s: %s", run.request.request_id, worker_id, error)
        run.retries.leave(worker_id)
        self._metrics.retries.labels(error.label).inc()


def _suspect(run: ChoiceRun, error: BatonError) -> None:
    """Counts an engine that fell silent before it gave ``run`` a token; what had one was no trouble to it.

    Raises RequestBlamed at the second one. A third would fall silent too, with everybody's requests on it.
    """
    retries = run.retries
    if not isinstance(error, WorkerStalled) or retries.fed:
        return
    retries.suspect()
    if retries.suspected >= MOST_SUSPECTED:
        text = (
            f"{retries.suspected} workers' engines stopped answering once they had this request: no other gets it"
        )
        raise RequestBlamed(f"{text}; change it, or ask the operator for the workers' logs") from error
