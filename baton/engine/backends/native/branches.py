"""Gives each branch of a tree of drafts a text of its own: its rows' places, and the KV that it begins with.

Knows nothing of ops or weights. A branch has pages for the blocks that drafts reach; in each layer, what is before
it there (the text's end, and the drafts that it follows) is copied in before attention reads. To attention every
path is then a text like any other, with each token at its own place, so that sums are made in the same order and
rows get the bits that they would have without a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.plan import SequenceStep
from baton.kv.layout.page import ITEM_BYTES, SCALE_BYTES, plane_bytes
from baton.protos.nouns import BLOCK_TOKENS, KvLayout

Place = tuple[int, int]  # a page, and a token's slot in it


class Branch(NamedTuple):
    """Places one limb: the position of its first row, its block table, and (from, to) of what is copied in."""

    start: int
    table: list[int]
    copies: list[tuple[Place, Place]]


def branches(item: SequenceStep) -> list[Branch]:
    """Returns where each limb of ``item`` lies, in order; its parent row is in the trunk or an earlier limb."""
    first = item.start // BLOCK_TOKENS
    own: list[Sequence[int]] = [item.pages[first:]] * item.trunk  # by row: its pages from block ``first`` on
    position = list(range(item.start, item.start + item.trunk))
    before = list(range(-1, item.trunk - 1))
    found = list[Branch]()
    for limb in item.limbs:
        start = position[limb.parent] + 1
        path = _path(limb.parent, before)
        copies = [
            (_place(own[0 if at < item.start else path[at - item.start]], at, first), _place(limb.pages, at, first))
            for at in range(first * BLOCK_TOKENS, start)
        ]
        end = start + limb.rows
        table = [*item.pages[:first], *limb.pages[: -(-end // BLOCK_TOKENS) - first]]
        found.append(Branch(start, table, copies))
        own += [limb.pages] * limb.rows
        position += range(start, end)
        before += [limb.parent, *range(limb.first, limb.first + limb.rows - 1)]
    return found


def _path(row: int, before: Sequence[int]) -> list[int]:
    """The rows from the item's first to ``row``."""
    found = [row]
    while (row := before[row]) >= 0:
        found.append(row)
    return found[::-1]


def _place(pages: Sequence[int], position: int, first: int) -> Place:
    return pages[position // BLOCK_TOKENS - first], position % BLOCK_TOKENS


def copyable(layout: KvLayout) -> bool:
    """Returns whether all layers lie alike in a page, so that tokens can be copied between pages."""
    return not layout.states and len({(g.planes, g.kv_heads, g.head_dim) for g in layout.groups}) == 1


class BranchCopies:
    """Copies tokens' KV between slots of pages, layer by layer; ``memory`` (pages, bytes) uint8 holds them all."""

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
        """Copies within ``layer``; ``index`` (4, tokens) has pages and slots to read, and to write."""
        from_page, from_slot, to_page, to_slot = index
        for view in self._views[layer]:
            view[to_page, :, to_slot] = view[from_page, :, from_slot]


def index_of(copies: Sequence[tuple[Place, Place]]) -> Tensor:
    """Returns ``copies`` as (4, tokens): pages and slots to read, and to write."""
    return torch.tensor([[*read, *write] for read, write in copies], dtype=torch.long).T
