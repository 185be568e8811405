"""The steps that a CUDA session runs before traffic: sizes, their order, within the pages that there are."""

from __future__ import annotations

import pytest

from baton.engine.backends.cuda import warming
from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.sequence_checks import require_computable
from baton.engine.plan import MOST_SCORED
from baton.worker.drafts import most_drafts


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
    first, *rest = warming.warm_steps(sequences, chunk, pages, context, drafts=20)
    loudest = warming.loudest_step(sequences, chunk, pages, context, drafts=20)
    for plan in (first, loudest, *rest):
        for item in plan.items:
            require_computable(item, 100, pages)
    assert len(first.items[-1].tokens) == min(chunk, context, pages * 16)
    assert len(first.items[-1].targets) == min(MOST_SCORED, len(first.items[-1].tokens)), "logprobs of a prompt"
    assert all(len(item.sample.history) == context for item in first.items[:-1] if item.sample)
    most = sequences * (min(16, context) - 1)  # in the one page of each
    assert sum(len(item.verify) for item in first.items) == min(20, most)
    assert not any(item.verify for plan in rest for item in plan.items)
    drafted, scored = min(20, most), len(first.items[-1].targets)
    assert len(NativeBatch(loudest, 100, pages).logits) == sequences + drafted + scored, "logprobs of all at once"
    assert [len(plan.items) for plan in rest] == [count for count in warming.sizes(sequences) for _ in range(2)]


@pytest.mark.parametrize(
    ("names", "sequences", "drafts"),
    [("auto", 64, 0), ("none", 64, 0), ("prompt_lookup", 4, 64), ("auto+suffix", 4, 64), ("draft:small", 64, 256)],
)
def test_as_many_drafts_are_prepared_for_as_a_step_on_a_card_may_have(
    names: str, sequences: int, drafts: int
) -> None:
    assert most_drafts(names, sequences) == drafts
