"""Submits steps to a GPU before the results of the step in front are there, and collects these one step late.

Knows nothing of sequences beyond a step, or of who plans. A row whose token the host doesn't know yet takes it, in
the device's memory, from the choices of the step that was submitted before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import numpy as np
import torch

from baton.engine.backends.native.batch import Array, NativeBatch
from baton.engine.plan import StepPlan, StepResult

MOST_UNDER_WAY = 2  # session.cuh: MOST_UNDER_WAY
OWN = -1  # in place of a choice: the row keeps its token


class SubmittingRunner(Protocol):
    """Is a runner whose steps have a beginning and an end."""

    def batch_of(self, plan: StepPlan) -> NativeBatch:
        """Returns the arrays of ``plan``."""

    def begin(self, plan: StepPlan, batch: NativeBatch, fed: Array | None = None) -> None:
        """Launches the step; ``fed`` as ``CudaRunner.begin`` takes it."""

    def finish(self, batch: NativeBatch) -> None:
        """Waits for the oldest step and fills in its tokens and logits."""

    def result_of(self, plan: StepPlan, batch: NativeBatch, seconds: float) -> StepResult:
        """Returns the results of a finished step."""


class Submitted(NamedTuple):
    """A step under way."""

    plan: StepPlan
    batch: NativeBatch
    at: float  # of the clock


class CudaSteps:
    """Implements ``AsyncSteps`` by the beginnings and ends of ``runner``'s steps; ``clock`` gives seconds."""

    def __init__(self, runner: SubmittingRunner, clock: Callable[[], float]) -> None:
        self._runner, self._clock = runner, clock
        self._under_way: deque[Submitted] = deque()
        self._choice_of: dict[int, int] = {}  # of the step submitted last: which choice is whose, by sequence
        self._ended = 0.0

    def submit(self, plan: StepPlan, fed: Collection[int] = ()) -> None:
        """Begins a step as ``AsyncSteps.submit``. Raises BatonError."""
        assert len(self._under_way) < MOST_UNDER_WAY, "a third step would overwrite the plan of one that runs"
        assert self._under_way or not fed, "nothing is under way that could feed a row"
        at = self._clock()
        with torch.inference_mode():
            batch = self._runner.batch_of(plan)
            # Even without a row that is fed, the upload mustn't wait for the step that runs.
            self._runner.begin(plan, batch, self._choices(plan, fed) if self._under_way else None)
        self._under_way.append(Submitted(plan, batch, at))
        self._choice_of = {seq: number for number, (seq, _) in enumerate(batch.sampled)}

    def collect(self) -> StepResult:
        """Waits for the oldest step as ``AsyncSteps.collect``. Raises BatonError."""
        step = self._under_way.popleft()
        with torch.inference_mode():
            self._runner.finish(step.batch)
            began, self._ended = max(step.at, self._ended), self._clock()
            return self._runner.result_of(step.plan, step.batch, self._ended - began)

    def _choices(self, plan: StepPlan, fed: Collection[int]) -> Array:
        """Returns for each row which choice of the step before is its token; nothing where none is."""
        if not fed:
            return np.empty(0, np.int32)
        found: list[int] = []
        for item in plan.items:
            found += [self._choice_of[item.seq]] if item.seq in fed else [OWN] * len(item.tokens)
        return np.array(found, np.int32)
