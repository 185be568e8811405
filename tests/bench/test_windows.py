"""The count of pages and blocks with a window, small."""

from baton.kv.layout.state import state_pages
from baton.kv.layout.tables import by_window
from bench.windows import HYBRIDS, measured, mistral, mixed, sharing


def test_with_a_window_fewer_blocks_are_shipped_and_leased():
    assert measured(mistral(), 512, 40) == (32, 32, 33, 35)
    assert measured(mistral(64), 512, 40) == (4, 32, 5, 7)
    assert measured(mistral(64), 2048, 40) == (4, 36, 5, 7)


def test_with_sinks_beside_the_window_these_are_shipped_and_leased_too():
    assert measured(mistral(0, "sinks:32,window:64"), 512, 40) == (7, 32, 8, 10)


def test_layers_with_a_window_beside_others_ship_what_it_shows_in_pages_of_their_own():
    whole = mixed("gpt-oss-20b")
    less = by_window(whole)
    assert whole.page_bytes == 2 * less.page_bytes
    assert measured(whole, 2048, 40) == (128, 128, 129, 131)
    assert measured(less, 2048, 40) == (128 + 8, 128 + 40, 129 + 9, 131 + 11)


def test_a_hybrid_ships_its_few_layers_of_attention_and_one_state():
    hybrid, dense = (HYBRIDS["qwen3-next-80b"].layout(each) for each in (False, True))
    assert (hybrid.page_bytes * 4, state_pages(hybrid)) == (dense.page_bytes, 201)
    assert measured(dense, 512, 40) == (32, 32, 33, 35)
    blocks, states = (32, 32, 33, 35), (1, 3, 3, 3)  # leased are a current state, one that is written, one kept
    assert measured(hybrid, 512, 40) == tuple(b + 201 * s for b, s in zip(blocks, states, strict=True))


def test_layers_that_read_the_k_and_v_of_others_are_neither_shipped_nor_leased():
    apart, shared = (sharing("gemma-3n-e4b", each) for each in (False, True))
    assert apart.page_bytes * 4 == shared.page_bytes * 7
    assert measured(shared, 2048, 40) == measured(apart, 2048, 40)
