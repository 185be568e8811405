"""Checks that a step which verifies trees of drafts gives each row what its own path gives as a plain text.

Knows nothing of devices or of pytest: a check takes a runner of a model of ``VOCAB`` tokens or more. Rows are
compared by the log-probabilities of their likeliest tokens, pages by their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.engine.plan import DraftBranch, Runner, SampleSpec, SequenceStep, StepPlan
from baton.engine.speculate.tree import chains, path_to, tree_of
from baton.protos.nouns import BLOCK_TOKENS, Sampling, TokenLogprobs

VOCAB, PAGES = 40, 64
TOLD = Sampling(temperature=0.0, logprobs=5)
# Trees by the length of the text before them: the likeliest paths first. With the root a tree has 8 rows at most,
# as many as the megakernel takes. Drafts cross a page, begin one, or stay within it; a branch follows the root, a
# draft, or a branch.
TREES: dict[int, list[list[int]]] = {
    14: [[5, 6, 7], [5, 8], [9, 10], [9, 11]],
    15: [[5, 6, 7], [5, 8, 9]],
    16: [[5], [6], [7, 8], [7, 9]],
    29: [[5, 6, 7, 8], [5, 6, 9, 10], [11]],
}
Read = Callable[[], NDArray[np.uint8]]  # all pages on the host, (PAGES, page bytes)


class Row(NamedTuple):
    """Holds the token that a row chose, and the likelihoods it chose from."""

    token: int
    logprobs: TokenLogprobs | None


def spec(position: int) -> SampleSpec:
    """Returns how a token at ``position`` is chosen: the likeliest, with log-probabilities."""
    return SampleSpec(TOLD, 0, position, (), 1)


def told(runner: Runner, *items: SequenceStep) -> list[Row]:
    """Returns what each row of a step chose that was asked."""
    return [Row(one.token_id, one.logprobs) for one in runner.run(StepPlan(items)).sampled]


def tree_item(
    seq: int, root: int, start: int, pages: list[int], spare: list[int], paths: list[list[int]]
) -> SequenceStep:
    """Returns the item of the tree of ``paths`` behind ``root``, which is at ``start``; branches take their pages
    from ``spare``.
    """
    tokens, parents = tree_of(paths, 99)
    draft_branches = []
    for part in chains(parents)[1:]:
        end = start + 1 + len(path_to(part.first - 1, parents)) + part.rows
        blocks = -(-end // BLOCK_TOKENS) - start // BLOCK_TOKENS
        draft_branches.append(DraftBranch(*part, pages=[spare.pop() for _ in range(blocks)]))
    verify = tuple(spec(start + 2) for _ in tokens)
    return SequenceStep(
        seq, [root, *tokens], start, pages, spec(start + 1), verify=verify, draft_branches=tuple(draft_branches)
    )


def paths_of(paths: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
    """Yields each row of the item of ``paths`` and the drafts up to it."""
    tokens, parents = tree_of(paths, 99)
    for node in range(-1, len(tokens)):
        yield node + 1, [tokens[at] for at in path_to(node, parents)]


def every_row_is_its_own_path(runner: Runner, read: Read, starts: tuple[int, ...] = tuple(TREES)) -> None:
    """Verifies trees at several places of a text, on other pages each time; whoever goes on with a branch's pages
    goes on with its path.
    """
    numbers, rng = iter(range(1000)), np.random.default_rng(7)
    for start in starts:
        drafted, plain = next(numbers), next(numbers)
        prompt, order = [3 + at % (VOCAB - 3) for at in range(start)], rng.permutation(PAGES).tolist()
        pages, spare = (order[:8], order[8:16]), order[16:]
        for seq, table in zip((drafted, plain), pages, strict=True):
            told(runner, SequenceStep(seq, prompt, 0, table))
        item = tree_item(drafted, 2, start, pages[0], spare, TREES[start])
        rows, after = told(runner, item), read().copy()
        ends = {branch.first + branch.rows - 1: branch for branch in item.draft_branches}
        for row, path in paths_of(TREES[start]):
            at = start + len(path)  # a node comes behind its parent, so the plain text before it is its path
            [alone] = told(runner, SequenceStep(plain, [path[-1] if path else 2], at, pages[1], spec(at + 1)))
            assert rows[row] == alone, (start, row)
            if (branch := ends.get(row)) is None:
                continue
            first, now = start // BLOCK_TOKENS, read()
            for block, page in enumerate(branch.pages, first):
                tokens = min(BLOCK_TOKENS, at + 1 - block * BLOCK_TOKENS)
                _same_tokens(runner, after[page], now[pages[1][block]], tokens)
            table = [*pages[0][:first], *branch.pages, spare[0]]
            [behind] = told(runner, SequenceStep(next(numbers), [4], at + 1, table, spec(at + 2)))
            [alone] = told(runner, SequenceStep(plain, [4], at + 1, pages[1], spec(at + 2)))
            assert behind == alone, (start, branch)


def _same_tokens(runner: Runner, page: NDArray[np.uint8], other: NDArray[np.uint8], tokens: int) -> None:
    """Compares the KV of a page's first ``tokens`` tokens with another's, in each plane of each layer."""
    layout = runner.spec.layout
    [group] = layout.groups
    element = {"bfloat16": 2, "int8": 1, "fp8_e4m3": 1, "float32": 4}[layout.dtype]
    row, scale = group.kv_heads * group.head_dim * element, group.kv_heads * 4 if element == 1 else 0
    plane = BLOCK_TOKENS * (row + scale)
    for at in range(0, layout.page_bytes, plane):
        mine, theirs = page[at : at + plane], other[at : at + plane]
        assert (mine[: tokens * row] == theirs[: tokens * row]).all(), at
        scales = BLOCK_TOKENS * row
        assert (mine[scales : scales + tokens * scale] == theirs[scales : scales + tokens * scale]).all(), at
