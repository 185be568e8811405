"""Runs pages of more than 16 tokens on kernels that read pages of 16: each page is several of the kernels' in a
row.

Knows nothing of models. The pool, the block hashes, the cache and the handoff use the worker's pages; the wrapped
runner sees ``block_tokens / 16`` pages for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.engine.plan import (
    Mirror,
    Ranks,
    Runner,
    SequenceStep,
    StepPlan,
    StepResult,
    adapters_of,
    internals_of,
    mirror_of,
    ranks_of,
    warm,
)
from baton.kv.layout.page import in_pages_of
from baton.protos.nouns import BLOCK_TOKENS

MOST_LANDING = 8192  # tables kept of sequences that have not run yet


class WidePages:
    """Implements ``Runner`` with pages of ``block_tokens`` tokens over ``runner``, whose pages hold 16."""

    def __init__(self, runner: Runner, block_tokens: int) -> None:
        layout = in_pages_of(runner.spec.layout, block_tokens)
        self.spec = msgspec.structs.replace(runner.spec, layout=layout)
        self.work, self.adapters = runner.work, adapters_of(runner)
        self.internals = internals_of(runner)
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

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step whose plan names wide pages; ``observed`` sums are per wide page, rows' per run."""
        self._tables = {item.seq: (item.pages, self._table(item)) for item in plan.items}
        found = self._runner.run(StepPlan(tuple(self._narrow(item) for item in plan.items)))
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


class WideMirror:
    """Implements ``Mirror`` for wide pages, each of which is ``runs`` pages of the mirror ``beneath``."""

    def __init__(self, beneath: Mirror, runs: int, landing: dict[int, tuple[Sequence[int], list[int]]]) -> None:
        self.shared = beneath.shared
        self._beneath, self._runs, self._landing = beneath, runs, landing

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
