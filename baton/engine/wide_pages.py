"""Runs pages of more than 16 tokens on kernels that read pages of 16: each page is several of the kernels' in a
row.

Knows nothing of models. The pool, the block hashes, the cache and the handoff use the worker's pages; the wrapped
runner sees ``block_tokens / 16`` pages for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from baton.engine.abilities import (
    AsyncSteps,
    Mirror,
    Ranks,
    adapters_of,
    async_steps_of,
    copies_left,
    demand_of,
    freed_of,
    internals_of,
    mirror_of,
    ranks_of,
    warm,
)
from baton.engine.plan import Runner, SequenceStep, StepPlan, StepResult
from baton.kv.layout.page import in_pages_of
from baton.protos.nouns import BLOCK_TOKENS

MOST_LANDING = 8192  # tables kept of sequences that have not run yet


class WidePages:
    """Implements ``Runner`` with pages of ``block_tokens`` tokens over ``runner``, whose pages hold 16."""

    def __init__(self, runner: Runner, block_tokens: int) -> None:
        layout = in_pages_of(runner.spec.layout, block_tokens)
        self.spec = msgspec.structs.replace(runner.spec, layout=layout)
        self.work, self.adapters = runner.work, adapters_of(runner)
        self.internals, self.on_demand = internals_of(runner), demand_of(runner)
        self._runner, self._runs = runner, layout.runs
        self._tables: dict[int, tuple[Sequence[int], list[int]]] = {}  # of the last step's sequences
        self._landing: dict[int, tuple[Sequence[int], list[int]]] = {}  # of those that have not run yet

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as ``pages`` wide pages."""
        self._runner.bind(buffer, pages * self._runs)

    def warm(self, sequences: int, chunk: int, drafts: int = 0) -> None:
        """Lets the wrapped runner prepare for its steps. Raises ConfigError."""
        warm(self._runner, sequences, chunk, drafts)

    @property
    def mirror(self) -> Mirror | None:
        """Returns the wrapped runner's mirror, which takes wide pages here; None if it has none."""
        beneath = mirror_of(self._runner)
        return None if beneath is None else WideMirror(beneath, self._runs, self._landing)

    @property
    def ranks(self) -> Ranks | None:
        """Returns the ranks of the wrapped runner; None if it runs as one process."""
        return ranks_of(self._runner)

    @property
    def async_steps(self) -> AsyncSteps | None:
        """Returns the asynchronous steps of the wrapped runner, whose plans name wide pages here; None if it has
        none.
        """
        beneath = async_steps_of(self._runner)
        return None if beneath is None else WideSteps(beneath, self.narrowed)

    def narrowed(self, plan: StepPlan) -> StepPlan:
        """Returns the next step's plan in the wrapped runner's pages."""
        self._tables = {item.seq: (item.pages, self._table(item)) for item in plan.items}
        return StepPlan(tuple(self._narrow(item) for item in plan.items))

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step whose plan names wide pages; ``observed`` sums are per wide page, rows' per run."""
        found = self._runner.run(self.narrowed(plan))
        if not found.observed:
            return found
        rows = {item.seq for item in plan.items if item.watch_rows}  # these stay by run
        by_page = {
            seq: scores if seq in rows else scores.reshape(-1, self._runs).sum(1)
            for seq, scores in found.observed.items()
        }
        return msgspec.structs.replace(found, observed=by_page)

    def _narrow(self, item: SequenceStep) -> SequenceStep:
        """Returns the item with its pages, gap and states in the wrapped runner's pages."""
        tables = tuple(_grown([], table, self._runs) for table in item.tables)
        narrow = msgspec.structs.replace(item, pages=self._tables[item.seq][1], gap=self._gap(item), tables=tables)
        if not item.state_to:
            return narrow
        source = None if item.state_from is None else _grown([], item.state_from, self._runs)
        return msgspec.structs.replace(narrow, state_from=source, state_to=_grown([], item.state_to, self._runs))

    def _gap(self, item: SequenceStep) -> tuple[int, int]:
        return item.gap[0] * self._runs, item.gap[1] * self._runs

    def _table(self, item: SequenceStep) -> list[int]:
        """Returns a sequence's page table in the wrapped runner's pages, extending the last step's if the table
        only grew.
        """
        known, table = self._tables.get(item.seq) or self._landing.pop(item.seq, None) or (None, [])
        if known is not item.pages:
            table = []
        return _grown(table, item.pages, self._runs)


class WideSteps:
    """Implements ``AsyncSteps`` for plans of wide pages, over ``beneath``; its steps observe no attention."""

    def __init__(self, beneath: AsyncSteps, narrowed: Callable[[StepPlan], StepPlan]) -> None:
        self._beneath, self._narrowed = beneath, narrowed

    def submit(self, plan: StepPlan, fed: Collection[int] = ()) -> None:
        """Begins the step ``plan`` as ``AsyncSteps.submit``."""
        self._beneath.submit(self._narrowed(plan), fed)

    def collect(self) -> StepResult:
        """Waits for the oldest step as ``AsyncSteps.collect``."""
        return self._beneath.collect()


class WideMirror:
    """Implements ``Mirror`` for wide pages, each of which is ``runs`` pages of the mirror ``beneath``."""

    def __init__(self, beneath: Mirror, runs: int, landing: dict[int, tuple[Sequence[int], list[int]]]) -> None:
        self.shared = beneath.shared
        self._beneath, self._runs, self._landing = beneath, runs, landing

    @property
    def copies_left(self) -> int | None:
        """Returns how many wide pages more can be made whole."""
        left = copies_left(self._beneath)
        return None if left is None else left // self._runs

    @property
    def freed(self) -> Callable[[Sequence[int]], None] | None:
        """Returns what reports to the wrapped mirror all of its pages that lie in freed ones; None where it wants
        to hear of none.
        """
        tell = freed_of(self._beneath)
        return None if tell is None else lambda pages: tell(_grown([], pages, self._runs))

    def opened(self, pages: Sequence[int]) -> None:
        """Reports to the wrapped mirror all of its pages that lie in ``pages``."""
        self._beneath.opened(_grown([], pages, self._runs))

    def landed(self, seq: int, table: Sequence[int], blocks: Sequence[int]) -> None:
        """Reports blocks to the wrapped mirror, with the page table that the sequence's first step will use."""
        known, wide = self._landing.pop(seq, (None, []))
        wide = _grown(wide if known is table else [], table, self._runs)
        self._landing[seq] = (table, wide)
        while len(self._landing) > MOST_LANDING:
            del self._landing[next(iter(self._landing))]
        self._beneath.landed(seq, wide, _grown([], blocks, self._runs))

    def taken(self, pages: Sequence[int]) -> None:
        """Reports to the wrapped mirror all of its pages that lie in ``pages``."""
        self._beneath.taken(_grown([], pages, self._runs))

    def make_whole(self, pages: Sequence[int]) -> None:
        """Makes all pages of the wrapped mirror that lie in ``pages`` whole."""
        self._beneath.make_whole(_grown([], pages, self._runs))

    def lend(self, pages: Sequence[int]) -> None:
        """Lends all pages of the wrapped mirror that lie in ``pages`` to other hosts."""
        self._beneath.lend(_grown([], pages, self._runs))

    def let_go(self, pages: Sequence[int]) -> None:
        """Lets go of all pages of the wrapped mirror that lie in ``pages``."""
        self._beneath.let_go(_grown([], pages, self._runs))


def _grown(table: list[int], pages: Sequence[int], runs: int) -> list[int]:
    """Returns ``table``, which covers the first of ``pages`` already, extended by ``runs`` narrow pages for each of
    the others.
    """
    for page in pages[len(table) // runs :]:
        table += range(page * runs, (page + 1) * runs)
    return table


def widened(runner: Runner, block_tokens: int) -> Runner:
    """Returns ``runner`` with pages of ``block_tokens`` tokens. Raises ConfigError unless that is a multiple
    of 16.
    """
    return runner if block_tokens == BLOCK_TOKENS else WidePages(runner, block_tokens)
