"""Pages of more than 16 tokens over kernels that read 16: each page is several of the kernels' in a row.

Knows nothing of models. The pool, the block hashes, the cache and the handoff see the worker's page; the runner
beneath sees ``block_tokens / 16`` pages for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.engine.plan import Runner, SequenceStep, StepPlan, StepResult
from baton.kv.layout import in_pages_of
from baton.protos.nouns import BLOCK_TOKENS


class WidePages:
    """A ``Runner`` over another."""

    def __init__(self, runner: Runner, block_tokens: int) -> None:
        layout = in_pages_of(runner.spec.layout, block_tokens)
        self.spec = msgspec.structs.replace(runner.spec, layout=layout)
        self.work = runner.work
        self._runner, self._runs = runner, layout.runs
        self._tables: dict[int, tuple[Sequence[int], list[int]]] = {}  # of the last step's sequences

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Use ``buffer`` as ``pages`` pages of this size."""
        self._runner.bind(buffer, pages * self._runs)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step on the pages beneath."""
        self._tables = {item.seq: (item.pages, self._table(item)) for item in plan.items}
        items = (msgspec.structs.replace(item, pages=self._tables[item.seq][1]) for item in plan.items)
        return self._runner.run(StepPlan(tuple(items)))

    def _table(self, item: SequenceStep) -> list[int]:
        """A sequence's pages as those beneath; a table that only grew since its last step is only grown."""
        known, table = self._tables.get(item.seq, (None, []))
        if known is not item.pages:
            table = []
        for page in item.pages[len(table) // self._runs :]:
            table += range(page * self._runs, (page + 1) * self._runs)
        return table


def widened(runner: Runner, block_tokens: int) -> Runner:
    """``runner`` with ``block_tokens`` tokens in a page. Raises ConfigError."""
    return runner if block_tokens == BLOCK_TOKENS else WidePages(runner, block_tokens)
