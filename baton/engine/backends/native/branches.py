"""Lays out each branch of a tree of drafts as a sequence of its own: its rows' positions and initial KV.

Knows nothing of ops or weights. A branch has pages for the blocks that drafts reach; in each layer, the KV before
it in those blocks (the text's end, and the drafts that it follows) is copied there before attention. To attention
every path is then an ordinary sequence, with each token at its own position, so that sums are made in the same
order and rows have the same bits as without a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.backends.spans import Span, span_of
from baton.engine.plan import SequenceStep, StepPlan
from baton.kv.layout.page import ITEM_BYTES, SCALE_BYTES, plane_bytes
from baton.protos.nouns import BLOCK_TOKENS, KvLayout

Place = tuple[int, int]  # a page, and a token's slot in it


class Branch(NamedTuple):
    """The place of one branch of drafts."""

    start: int  # position of its first row
    table: list[int]  # its block table
    copies: list[tuple[Place, Place]]  # slots of KV to copy before attention: (from, to)


def branches(item: SequenceStep) -> list[Branch]:
    """Returns the place of each of ``item.draft_branches``, in order; each follows the trunk or an earlier one."""
    first = item.start // BLOCK_TOKENS
    own: list[Sequence[int]] = [item.pages[first:]] * item.trunk  # by row: its pages from block ``first`` on
    position = list(range(item.start, item.start + item.trunk))
    before = list(range(-1, item.trunk - 1))
    found = list[Branch]()
    for draft_branch in item.draft_branches:
        start = position[draft_branch.parent] + 1
        path = _path(draft_branch.parent, before)
        copies = [
            (
                _place(own[0 if at < item.start else path[at - item.start]], at, first),
                _place(draft_branch.pages, at, first),
            )
            for at in range(first * BLOCK_TOKENS, start)
        ]
        end = start + draft_branch.rows
        table = [*item.pages[:first], *draft_branch.pages[: -(-end // BLOCK_TOKENS) - first]]
        found.append(Branch(start, table, copies))
        own += [draft_branch.pages] * draft_branch.rows
        position += range(start, end)
        before += [draft_branch.parent, *range(draft_branch.first, draft_branch.first + draft_branch.rows - 1)]
    return found


def spans_of(plan: StepPlan) -> tuple[Span, ...]:
    """Returns the spans of a step whose rows are in the plan's order; of a tree its trunk's and each branch's."""
    found, first = list[Span](), 0
    for item in plan.items:
        found.append(span_of(item, first)._replace(queries=item.trunk))
        for draft_branch, branch in zip(item.draft_branches, branches(item), strict=True):
            found.append(Span(first + draft_branch.first, draft_branch.rows, branch.start, branch.table))
        first += len(item.tokens)
    return tuple(found)


def _path(row: int, before: Sequence[int]) -> list[int]:
    """Returns the rows from the item's first to ``row``."""
    found = [row]
    while (row := before[row]) >= 0:
        found.append(row)
    return found[::-1]


def _place(pages: Sequence[int], position: int, first: int) -> Place:
    return pages[position // BLOCK_TOKENS - first], position % BLOCK_TOKENS


def copyable(layout: KvLayout) -> bool:
    """Returns whether all layers have the same layout in a page, so that tokens' KV can be copied between pages."""
    return not layout.states and len({(g.planes, g.kv_heads, g.head_dim) for g in layout.groups}) == 1


class BranchCopies:
    """Copies tokens' KV between slots of pages, layer by layer; ``memory`` (pages, page bytes) uint8 has all
    pages.
    """

    def __init__(self, layout: KvLayout, layers: int, memory: Tensor) -> None:
        group, at_layer = layout.groups[0], layout.page_bytes // layers
        row, plane = group.kv_heads * group.head_dim * ITEM_BYTES[layout.dtype], plane_bytes(layout.dtype, group)
        parts = [(0, row)]
        if layout.dtype in SCALE_BYTES:
            parts.append((BLOCK_TOKENS * row, group.kv_heads * SCALE_BYTES[layout.dtype]))
        pages, whole = memory.shape
        self._views = [
            [
                memory.as_strided((pages, len(group.planes), BLOCK_TOKENS, size), (whole, plane, size, 1), begin)
                for begin, size in ((layer * at_layer + offset, size) for offset, size in parts)
            ]
            for layer in range(layers)
        ]

    def run(self, layer: int, index: Tensor) -> None:
        """Copies KV of ``layer``; ``index`` (4, tokens) int64 has the pages and slots to read, and those to
        write.
        """
        from_page, from_slot, to_page, to_slot = index
        for view in self._views[layer]:
            view[to_page, :, to_slot] = view[from_page, :, from_slot]


def slots_of(copies: Sequence[tuple[Place, Place]]) -> NDArray[np.int32]:
    """Returns ``copies`` as (copies, 2) int32: each slot to read and the one to write, 16 to a page."""
    return np.array([[page * BLOCK_TOKENS + slot for page, slot in copy] for copy in copies], np.int32)


def index_of(copies: Sequence[tuple[Place, Place]]) -> Tensor:
    """Returns ``copies`` as (4, tokens) int64: pages and slots to read, and those to write."""
    return torch.tensor([[*read, *write] for read, write in copies], dtype=torch.long).T
