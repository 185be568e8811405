"""Tests shapes of trees: what stands, which rows branch off, and what is left when nodes are left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.speculate.draft import Draft, accepted
from baton.engine.speculate.tree import (
    ROOT,
    RowChain,
    chains,
    depths,
    first_chain,
    path_to,
    pruned,
    ranks,
    tree_of,
    walked,
)

PATHS = [[1, 2, 3], [1, 5], [7, 8], [1, 2, 9]]
paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=6)


def test_paths_with_a_common_beginning_share_its_nodes() -> None:
    tokens, parents = tree_of(PATHS, 99)
    assert tokens == [1, 2, 3, 9, 5, 7, 8]
    assert parents == [ROOT, 0, 1, 1, 0, ROOT, 5]
    assert depths(parents) == [0, 1, 2, 2, 1, 0, 1]
    assert ranks(parents) == [0, 0, 0, 1, 1, 1, 0]
    assert first_chain(parents) == 3
    assert chains(parents) == [RowChain(ROOT, 0, 4), RowChain(2, 4, 1), RowChain(1, 5, 1), RowChain(0, 6, 2)]
    assert path_to(6, parents) == [5, 6]
    assert tree_of(PATHS, 4) == ([1, 2, 3, 5], [ROOT, 0, 1, 0])


def test_the_path_that_the_model_chose_stands() -> None:
    tokens, parents = tree_of(PATHS, 99)
    after = {0: 1, 1: 2, 2: 9, 4: 33}
    assert walked(tokens, parents, [after.get(row, 77) for row in range(8)]) == [0, 1, 2, 4]
    assert walked(tokens, parents, [7, 0, 0, 0, 0, 0, 8, 0]) == [0, 6, 7]
    assert walked(tokens, parents, [6] * 8) == [0]
    assert walked(tokens, parents, [1]) == [0], "a step that was run again without its drafts"


@given(paths, st.lists(st.integers(0, 3), min_size=99, max_size=99))
def test_whatever_is_chosen_what_stands_is_a_path_of_it(given_paths: list[list[int]], chosen: list[int]) -> None:
    tokens, parents = tree_of(given_paths, 32)
    rows = walked(tokens, parents, chosen[: len(tokens) + 1])
    assert [tokens[row - 1] for row in rows[1:]] == [chosen[row] for row in rows[:-1]]
    assert [row - 1 for row in rows[1:]] == path_to(rows[-1] - 1, parents)
    ends = [s.first + s.rows for s in chains(parents)]
    assert ends[-1] == len(tokens) + 1
    assert [s.first for s in chains(parents)] == [0, *ends[:-1]]
    every = {tuple(tokens[node] for node in path_to(node, parents)) for node in range(len(tokens))}
    assert len(every) == len(tokens)
    assert len(tokens) == 32 or every == {tuple(path[:n]) for path in given_paths for n in range(1, len(path) + 1)}


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_a_chain_is_a_tree_too(tokens: list[int], chosen: list[int]) -> None:
    chosen = chosen[: len(tokens) + 1]
    chain = Draft(tokens, "x", 0)
    assert list(chain.stands(chosen)) == walked(tokens, range(-1, len(tokens) - 1), chosen)
    assert len(chain.stands(chosen)) == accepted(tokens, chosen[:-1]) + 1


def test_nodes_left_out_leave_a_tree_and_what_is_no_longer_one_is_a_chain() -> None:
    tokens, parents = tree_of(PATHS, 99)
    draft = Draft(tokens, "x", 0, parents=parents)
    assert pruned(tokens, parents, [0, 4, 5]) == ([1, 5, 7], [ROOT, 0, ROOT])
    assert draft.of([0, 4, 5]) == Draft([1, 5, 7], "x", 0, parents=[ROOT, 0, ROOT])
    assert draft.of([5, 6]) == Draft([7, 8], "x", 0)
    assert draft.chain() == Draft([1, 2, 3], "x", 0)
    assert draft.paths()[3] == [1, 2, 9]
