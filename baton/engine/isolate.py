"""Runs a step so that a sequence that can't be computed fails alone. Torch-free.

Knows nothing of schedulers or pages. Running an item twice is harmless: the same tokens write the same KV at the
same positions, and randomness is keyed by position.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.plan import PooledStates, Runner, SampledToken, SequenceStep, StepPlan
from baton.protos.errors import RankLost
from baton.protos.nouns import TokenLogprobs


class StepOutcome(msgspec.Struct):
    """Holds what became of a step: tokens by sequence where any were sampled, an exception where it failed."""

    sampled: dict[int, tuple[SampledToken, ...]]
    failed: dict[int, Exception]
    seconds: float
    scored: dict[int, tuple[TokenLogprobs, ...]] = {}
    pooled: dict[int, PooledStates] = {}
    states: dict[int, NDArray[np.float32]] = {}
    observed: dict[int, NDArray[np.float32]] = {}

    def absorb(self, other: StepOutcome) -> None:
        """Adds the outcome of another part of the same plan."""
        self.sampled |= other.sampled
        self.failed |= other.failed
        self.scored |= other.scored
        self.pooled |= other.pooled
        self.states |= other.states
        self.observed |= other.observed
        self.seconds += other.seconds


def run_isolated(runner: Runner, plan: StepPlan) -> StepOutcome:
    """Runs ``plan``; where the runner raises, halves the plan until the culprits stand alone.

    Raises RankLost, which no sequence can be blamed for.
    """
    try:
        result = runner.run(plan)
    except RankLost:
        raise
    except Exception as error:
        if len(plan.items) == 1:
            return _alone(runner, plan.items[0], error)
        return _halves(runner, plan.items)
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
    """A sequence fails for what it is, never for what was drafted for it."""
    if item.verify:
        return run_isolated(runner, StepPlan((item.undrafted(),)))
    return StepOutcome({}, {item.seq: error}, 0.0)


def _halves(runner: Runner, items: tuple[SequenceStep, ...]) -> StepOutcome:
    middle = len(items) // 2
    outcome = run_isolated(runner, StepPlan(items[:middle]))
    outcome.absorb(run_isolated(runner, StepPlan(items[middle:])))
    return outcome
