"""The entry of dispatch: opens requests, one task per choice, and closes what still runs.

Knows nothing of text, HTTP, or how a choice is placed and run: the runner does that. Whatever ends a choice's task
(the answer, a cancel, a deadline, an error) gives back its place in the queue, its lease and its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from baton.protos.adapter_id import name_of
from baton.protos.errors import BatonError, Draining, ModelNotFound, Unavailable
from baton.router.dispatch.admission import Admission, load_of
from baton.router.dispatch.choice_run import ChoiceRun
from baton.router.dispatch.progress import ChoiceProgress
from baton.router.dispatch.runner import ChoiceRunner
from baton.router.dispatch.view import ClusterView
from baton.router.observe.decisions import DecisionLog
from baton.router.request.context_class import ContextClasses
from baton.router.request.request import ChoiceStream, ChoiceSummary, RouterRequest, ServedModel

EndObserver = Callable[[RouterRequest, ChoiceSummary], object]
RefusalObserver = Callable[[RouterRequest, str], object]


class DispatchObservers(msgspec.Struct, frozen=True):
    """Holds callbacks about requests: ``ended`` are called for each choice as it ends, however it ended.

    ``refused`` are called with the request and its context class when it is refused on opening.
    """

    ended: tuple[EndObserver, ...] = ()
    refused: tuple[RefusalObserver, ...] = ()


class Dispatcher:
    """Opens requests and runs their choices through the cluster, each in a task of its own."""

    def __init__(
        self,
        view: ClusterView,
        admission: Admission,
        classes: ContextClasses,
        decisions: DecisionLog,
        runner: ChoiceRunner,
        observers: DispatchObservers = DispatchObservers(),
    ) -> None:
        self._view, self._admission, self._classes = view, admission, classes
        self._decisions, self._runner, self._observers = decisions, runner, observers
        self._open: dict[asyncio.Task[None], ChoiceRun] = {}

    # ---- what the surfaces call ----------------------------------------------------------------------

    def open(self, request: RouterRequest) -> list[ChoiceStream]:
        """Opens a request and returns one stream per choice; choice 0 prefills the prompt, the others follow it to
        its decode worker.

        Raises Overloaded, Draining and ModelNotFound; later errors are raised by iterating the streams.
        """
        request, context_class = self._classed(request)
        try:
            self._require_model(request.model_id)
            first = self._admission.join(request.model_id, context_class, load_of(request))
        except BatonError as error:
            self._refuse(request, context_class, error)
            raise
        with ExitStack() as undo:
            undo.callback(first.leave)
            tickets = [first, *(self._admission.beside(first) for _ in range(1, request.n))]
            home: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            record = self._decisions.opened(request, context_class)
            runs = []
            for choice, ticket in enumerate(tickets):
                progress = ChoiceProgress(request, choice, context_class, self._runner.clock)
                trail = self._decisions.writer(record, choice, progress.summary)
                runs.append(ChoiceRun(request, choice, ticket, home, progress, trail))
            for run in runs:
                undo.callback(run.stream.cancel, "failed")
                self._start(run)
            streams = [run.stream for run in runs]
            undo.pop_all()  # from here on it is for the streams' readers to end them
        return streams

    def models(self) -> tuple[ServedModel, ...]:
        """Returns the models that reachable workers serve."""
        return self._view.models()

    def queued(self) -> int:
        """Returns the number of requests that wait for a worker."""
        return self._admission.queued

    def spare(self, model_id: str) -> bool:
        """Returns whether a worker of the model could answer a request now, and none of its requests waits for one;
        "" for a model that isn't known asks for any worker.
        """
        return self._view.ready(model_id) and not self._admission.queued_of(model_id)

    @property
    def held_bytes(self) -> int:
        """Returns the estimated bytes that requests in flight hold in this process."""
        return self._admission.held_bytes

    def waiting(self) -> dict[str, int]:
        """Returns the number of requests that wait for a worker, by context class."""
        return {name: self._admission.waiting(name) for name in self._classes.names}

    def adapters_in_use(self) -> set[str]:
        """Returns the ids of the adapters that requests in flight use."""
        return {run.request.context.adapter_id for run in self._open.values()} - {""}

    def ready(self) -> bool:
        """Returns whether some worker could answer a request now."""
        return self._view.ready()

    def __len__(self) -> int:
        """Returns the number of choices in flight."""
        return len(self._open)

    async def close(self) -> None:
        """Refuses new requests, cancels the running ones with Draining, and returns when they have ended."""
        self._admission.close()
        for run in list(self._open.values()):
            run.stream.fail(Draining("the router is shutting down"), "shutdown")
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    # ---- begin and end of a choice -------------------------------------------------------------------

    def _start(self, run: ChoiceRun) -> None:
        task = asyncio.create_task(self._runner.run(run), name=f"{run.request.request_id} choice {run.choice}")
        self._open[task] = run
        run.stream.on_cancel(task.cancel)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """Ends a choice, also one whose task was cancelled before its first step."""
        run = self._open.pop(task)
        if not run.stream.ended:  # cancelled, but not by its reader, who waits: gRPC does that as a channel closes
            run.stream.fail(Unavailable("the router lost this request on its way; send it again"))
        run.close()
        for tell in self._observers.ended:
            tell(run.request, run.summary)

    def _refuse(self, request: RouterRequest, context_class: str, error: BatonError) -> None:
        self._decisions.refused(request, context_class, error)
        for tell in self._observers.refused:
            tell(request, context_class)

    def _classed(self, request: RouterRequest) -> tuple[RouterRequest, str]:
        """Returns the request with its class's SLOs where it names none of its own, and the class's name."""
        found = self._classes.of(len(request.token_ids), name_of(request.context.adapter_id))
        context = request.context.with_slos(found.slo_ttft_s, found.slo_tpot_s)
        if context is not request.context:
            request = msgspec.structs.replace(request, context=context)
        return request, found.name

    def _require_model(self, model_id: str) -> None:
        served = [m.model_id for m in self._view.models()]
        if served and model_id not in served:
            raise ModelNotFound(f"no model {model_id!r} here; there is {', '.join(served)}", "model")
