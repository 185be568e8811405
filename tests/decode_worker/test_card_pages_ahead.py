"""Pages on a card whose steps are planned while others run: the card copies and computes as late as it may.

What a step brings is read on the host when the card gets there, which CUDA allows where memory isn't pinned.
Whoever gives such a page's memory back before has a wrong token in the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import pytest

from baton.decode_worker.engine.async_loop import AsyncDecodeLoop
from baton.engine.backends.cuda.demand_pages import DemandPages
from baton.engine.backends.paced.runner import PacedRunner
from baton.engine.plan import StepPlan, StepResult
from tests.decode_worker.test_card_pages import PAGE, CardRunner, Cards, busy


class CardSteps:
    """Implements ``AsyncSteps`` of a card with DemandPages, as engine/backends/cuda/runner.py tells these."""

    def __init__(self, card: CardRunner, pages: DemandPages) -> None:
        self._card, self._pages = card, pages
        self._under_way: deque[tuple[StepPlan, frozenset[int], list[int]]] = deque()
        self._results: deque[StepResult] = deque()
        self._chosen: dict[int, int] = {}

    def submit(self, plan: StepPlan, fed: Collection[int] = ()) -> None:
        brought = self._pages.missing(plan.items)
        items = [msgspec.structs.replace(item, pages=list(item.pages)) for item in plan.items]
        self._under_way.append((StepPlan(tuple(items)), frozenset(fed), brought))
        self._pages.ran(plan.items, brought)

    def collect(self) -> StepResult:
        if not self._results:
            self._compute()
        self._pages.ended()
        return self._results.popleft()

    def finish_all(self) -> None:
        """Computes all steps under way, as whoever waits for the card has it."""
        while self._under_way:
            self._compute()

    def _compute(self) -> None:
        plan, fed, brought = self._under_way.popleft()
        for page in brought:
            self._card.card[page * PAGE : (page + 1) * PAGE] = self._card.host[page * PAGE : (page + 1) * PAGE]
        items = [
            msgspec.structs.replace(item, tokens=[self._chosen[item.seq]]) if item.seq in fed else item
            for item in plan.items
        ]
        found = PacedRunner.run(self._card, StepPlan(tuple(items)))
        self._chosen = {one.seq: one.token_id for one in found.sampled}
        self._results.append(found)


class Ahead(Cards):
    """The bench of pages on a card with a loop that plans ahead."""

    def __init__(self, pages: int = 64, copies: int | None = None, **limits: Any) -> None:
        super().__init__(pages, copies, **limits)
        held, sync, fetch = self.card.resident, self.loop, self.card._fetch
        assert isinstance(held, DemandPages)
        steps = CardSteps(self.card, held)

        def fetched(wanted: Sequence[int]) -> None:
            steps.finish_all()
            fetch(wanted)

        held._fetch = fetched
        self.loop: AsyncDecodeLoop = AsyncDecodeLoop(sync.parts, sync.limits, sync.entropy, steps)
        assert self.loop.swap is not None
        self.loop.swap._cheaper = lambda size, tokens: True  # type: ignore[method-assign]


@pytest.mark.parametrize("copies", [0, 4])
@pytest.mark.parametrize("seed", range(4))
def test_answers_are_right_where_the_card_reads_late_what_a_step_brings(seed: int, copies: int) -> None:
    bench = busy(seed, copies=copies, kind=Ahead)
    assert bench.loop.extras()["steps_ahead"] > 50
