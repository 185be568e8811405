"""Asynchronous steps of any runner, computed as late as a device may: when their results are waited for.

Knows nothing of devices. A page that somebody else was given while a step in flight still writes it has wrong bytes
afterwards, which a step that is computed at once would never show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import msgspec

from baton.engine.plan import Runner, SequenceStep, StepPlan, StepResult

NOTHING = 0  # what a row is fed by a step that failed


class LateSteps:
    """Implements ``AsyncSteps`` over ``runner``, which computes in ``collect``."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._under_way: deque[tuple[StepPlan, frozenset[int]]] = deque()
        self._chosen: dict[int, int] = {}  # the tokens of the step that was computed last, by sequence

    def submit(self, plan: StepPlan, fed: Collection[int] = ()) -> None:
        """Takes a step, with its page tables as they are now."""
        assert len(self._under_way) < 2, "two steps are under way"
        copied = [msgspec.structs.replace(item, pages=list(item.pages)) for item in plan.items]
        self._under_way.append((StepPlan(tuple(copied)), frozenset(fed)))

    def collect(self) -> StepResult:
        """Computes the oldest step, in which rows take the tokens of the one before it. Raises what the runner
        does.
        """
        plan, fed = self._under_way.popleft()
        items, self._chosen = [self._fed(item) if item.seq in fed else item for item in plan.items], {}
        found = self._runner.run(StepPlan(tuple(items)))
        self._chosen = {one.seq: one.token_id for one in found.sampled}
        return found

    def _fed(self, item: SequenceStep) -> SequenceStep:
        assert len(item.tokens) == 1, "one token is fed"
        return msgspec.structs.replace(item, tokens=[self._chosen.get(item.seq, NOTHING)])
