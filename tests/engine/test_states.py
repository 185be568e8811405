"""Tests where a sequence's recurrent states lie: what is read, what is written and what stays findable never
mix.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.states import SequenceStates, StateRules
from baton.kv.layout.state import state_hashes
from baton.kv.pages.pool import PagePool

SIZE, PARTS = 4, 2  # tokens of a block, pages of a state
BLOCKS = [bytes([i]) * 32 for i in range(64)]


@given(
    steps=st.lists(st.integers(1, 3 * SIZE), max_size=24),
    prompt=st.integers(1, 5 * SIZE),
    every=st.integers(1, 6),
    pages=st.integers(3 * PARTS, 40),
)
def test_a_cached_state_is_that_of_its_block_and_no_step_writes_what_it_reads(
    steps: list[int], prompt: int, every: int, pages: int
) -> None:
    pool, rules, wrote = PagePool(pages), StateRules(PARTS, every), dict[int, int]()
    states, at = SequenceStates(pool, rules), 0
    states.lease()
    for step in steps:
        end = rules.cut(at, at + step, prompt, SIZE)
        assert len(set(states.target)) == PARTS, "a step has somewhere to write"
        assert at == 0 or len(states.source or ()) == PARTS
        assert not set(states.source or ()) & set(states.target)
        assert all(wrote[page] == at for page in states.source or ())
        wrote |= dict.fromkeys(states.target, end)
        at = end
        states.advance(at, prompt, SIZE, BLOCKS.__getitem__, rolling=at >= prompt)
    states.close()
    assert pool.snapshot_counts().leased == 0
    for index, block in enumerate(BLOCKS):
        found = [pool.blocks.page_of.get(part) for part in state_hashes(block, PARTS)]
        assert all(wrote[page] == (index + 1) * SIZE for page in found if page is not None)
