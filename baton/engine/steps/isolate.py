"""Runs a step so that a sequence that can't be computed fails alone. Torch-free.

Knows nothing of schedulers or pages. Running an item twice is harmless: the same tokens write the same KV at the
same positions, and randomness is keyed by position.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.plan import PooledStates, Runner, SampledToken, SequenceStep, StepPlan, StepResult
from baton.protos.errors import RankLost
from baton.protos.nouns import TokenLogprobs


class StepOutcome(msgspec.Struct):
    """Holds the results of a step by sequence number; ``scored``, ``pooled``, ``states`` and ``observed`` are as in
    ``StepResult``.
    """

    sampled: dict[int, tuple[SampledToken, ...]]  # one token, and one more per verified draft
    failed: dict[int, Exception]  # sequences that could not be computed
    seconds: float  # of all forward passes together
    scored: dict[int, tuple[TokenLogprobs, ...]] = {}
    pooled: dict[int, PooledStates] = {}
    states: dict[int, NDArray[np.float32]] = {}
    observed: dict[int, NDArray[np.float32]] = {}

    def absorb(self, other: StepOutcome) -> None:
        """Adds the results of ``other``, another part of the same plan, to these."""
        self.sampled |= other.sampled
        self.failed |= other.failed
        self.scored |= other.scored
        self.pooled |= other.pooled
        self.states |= other.states
        self.observed |= other.observed
        self.seconds += other.seconds


def run_isolated(runner: Runner, plan: StepPlan) -> StepOutcome:
    """Runs ``plan`` and returns its results by sequence; if the runner raises, halves are run until only the
    sequences at fault fail.

    A sequence that fails with drafts is run again without them. Raises RankLost, which is no sequence's fault.
    """
    try:
        result = runner.run(plan)
    except RankLost:
        raise
    except Exception as error:
        if len(plan.items) == 1:
            return _alone(runner, plan.items[0], error)
        return _halves(runner, plan.items)
    return outcome_of(plan, result)


def outcome_of(plan: StepPlan, result: StepResult) -> StepOutcome:
    """Returns the results of ``plan``, in which no sequence failed, by sequence."""
    sampled = _by_sequence(plan, result.sampled)
    of = result.scored, result.pooled, result.states, result.observed
    return StepOutcome(sampled, {}, result.seconds, *of)


def _by_sequence(plan: StepPlan, sampled: tuple[SampledToken, ...]) -> dict[int, tuple[SampledToken, ...]]:
    found, at = dict[int, tuple[SampledToken, ...]](), 0
    for item in plan.items:
        if item.sample is not None:
            end = at + 1 + len(item.verify)
            found[item.seq], at = sampled[at:end], end
    return found


def _alone(runner: Runner, item: SequenceStep, error: Exception) -> StepOutcome:
    """Runs the item again without drafts, if it has some; reports ``error`` as the sequence's failure otherwise."""
    if item.verify:
        return run_isolated(runner, StepPlan((item.undrafted(),)))
    return StepOutcome({}, {item.seq: error}, 0.0)


def _halves(runner: Runner, items: tuple[SequenceStep, ...]) -> StepOutcome:
    middle = len(items) // 2
    outcome = run_isolated(runner, StepPlan(items[:middle]))
    outcome.absorb(run_isolated(runner, StepPlan(items[middle:])))
    return outcome
