"""Gives layers that see a window pages of their own, so that these can be given back one by one. Torch-free.

Knows nothing of leases or of hashes. Some models alternate layers that see all tokens with layers that see a
window (Gemma, gpt-oss). By default a page holds a block of all layers and stays as long as one of them may read it.
A layout with ``windows`` divides a block among several pages of equal size. The first has the layers that see all
tokens. Each further one has as many of the layers with a window, in order; the last may have room to spare:

    windows (0, 512, 512)    page 1 [layers that see all]   page 2 [layers with a window]   page 3 [others]

A sequence has a page table for each entry of ``windows``. The fidelity has a mark, because a block's first page
alone isn't what other workers keep under the same hash. A handoff between a worker with such pages and one whose
pages have all layers converts them (``kv/layout/table_bridge.py``).
"""

from __future__ import annotations

import msgspec

from baton.kv.layout.page import group_bytes, in_pages_of
from baton.protos.nouns import BLOCK_TOKENS, KvLayout

MARK = "+own-windows"  # at the end of the fidelity


def by_window(layout: KvLayout) -> KvLayout:
    """Returns ``layout``, of pages of 16 tokens, with pages of their own for layers with a window.

    It is returned unchanged where that is of no use or not possible: unless it has two groups of layers of one
    shape, one without a window and one, at least as large, with a window.
    """
    if len(layout.groups) != 2 or layout.states:
        return layout
    whole, windowed = sorted(layout.groups, key=lambda group: group.window)
    shapes = {(group.planes, group.kv_heads, group.head_dim) for group in layout.groups}
    if whole.window or not windowed.window or whole.layers > windowed.layers or len(shapes) > 1:
        return layout
    further = -(-windowed.layers // whole.layers)
    return msgspec.structs.replace(
        layout,
        groups=(whole,),
        page_bytes=group_bytes(layout.dtype, whole),
        fidelity=layout.fidelity + MARK,
        windows=(0, *[windowed.window] * further),
    )


def table_count(layout: KvLayout) -> int:
    """Returns the number of page tables that a sequence has, which is the number of pages of a block."""
    return max(1, len(layout.windows))


def layers_of_page(layout: KvLayout) -> int:
    """Returns the number of layers that a page has room for."""
    return sum(group.layers for group in layout.groups)


def undivided(divided: KvLayout, like: KvLayout) -> KvLayout | None:
    """Returns ``divided``, which has pages by window, with all layers in one page, in the order that they have in a
    page of ``like``; None if ``like`` is of other layers or windows.
    """
    heads = divided.groups[0].kv_heads
    groups = tuple([msgspec.structs.replace(group, kv_heads=heads) for group in like.groups])
    whole = msgspec.structs.replace(
        divided,
        groups=groups,
        page_bytes=divided.runs * sum(group_bytes(divided.dtype, group) for group in groups),
        fidelity=divided.fidelity.removesuffix(MARK),
        windows=(),
    )
    again = by_window(in_pages_of(whole, BLOCK_TOKENS))
    return whole if in_pages_of(again, divided.block_tokens) == divided else None


def alike(sender: KvLayout, receiver: KvLayout) -> tuple[KvLayout, KvLayout]:
    """Returns both layouts with all layers in one page, if just one of them has pages by window and both are of the
    same layers, in pages of as many tokens; else as they are.
    """
    if bool(sender.windows) == bool(receiver.windows) or sender.block_tokens != receiver.block_tokens:
        return sender, receiver
    if sender.windows:
        return undivided(sender, receiver) or sender, receiver
    return sender, undivided(receiver, sender) or receiver
