"""The steps that a CUDA session runs before traffic: sizes, their order, within the pages that there are."""

from __future__ import annotations

import pytest

from baton.engine.backends.cuda import warming
from baton.engine.backends.sequence_checks import require_computable


@pytest.mark.parametrize(
    ("sequences", "wanted"), [(1, [1]), (5, [5, 4, 2, 1]), (64, [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1])]
)
def test_each_padded_size_is_run_once_the_largest_first(sequences: int, wanted: list[int]) -> None:
    assert warming.sizes(sequences) == wanted
    assert len({warming.bucket(count) for count in wanted}) == len(wanted)


@pytest.mark.parametrize(
    ("sequences", "chunk", "pages", "context"), [(64, 512, 1000, 4096), (8, 512, 2, 20), (3, 1, 1, 9)]
)
def test_the_steps_can_be_computed_on_the_pages_that_there_are(
    sequences: int, chunk: int, pages: int, context: int
) -> None:
    first, *rest = warming.warm_steps(sequences, chunk, pages, context)
    for plan in (first, *rest):
        for item in plan.items:
            require_computable(item, 100, pages)
    assert len(first.items[-1].tokens) == min(chunk, context, pages * 16)
    assert all(len(item.sample.history) == context for item in first.items[:-1] if item.sample)
    assert [len(plan.items) for plan in rest] == [count for count in warming.sizes(sequences) for _ in range(2)]
