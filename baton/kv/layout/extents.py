"""Divides a page's bytes among hosts of one worker, each of which has some of its layers or heads. Torch-free.

Knows nothing of frames, leases or ranks. A host's part is a list of extents, byte ranges of a page, so that it
says all of a receiver's page whatever the dtype: a scaled dtype's scales are ranges like any others. What one host
of a sender brings to one host of a receiver is what their parts have in common.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from baton.kv.layout.page import ITEM_BYTES, SCALE_BYTES, plane_bytes
from baton.protos.errors import LayoutMismatch
from baton.protos.nouns import BLOCK_TOKENS, Extent, KvLayout, LayerGroup

MOST_EXTENTS = 1 << 14  # of one part, so that a peer can't ask for work without end
MOST_RECEIVERS = 64  # hosts of one worker that take a part each, for the same reason
FIELD = "extents"

Part = tuple[Extent, ...]
Heads = tuple[int, int]  # [first, end)


def part_bytes(part: Sequence[Extent]) -> int:
    """Returns the number of bytes of a part."""
    return sum(each.bytes * each.count for each in part)


def part_of(layout: KvLayout, owned: Mapping[int, Heads]) -> Part:
    """Returns the part of a page of ``layout`` that holds the KV heads ``owned``, by layer; other layers are not in
    it.
    """
    found = list[Extent]()
    for run in range(layout.runs):
        at, layer = run * layout.run_bytes, 0
        for group in layout.groups:
            size = len(group.planes) * plane_bytes(layout.dtype, group)
            for _ in range(group.layers):
                for extent in _of_layer(layout.dtype, group, at, owned.get(layer, (0, 0))):
                    _add(found, extent)
                at, layer = at + size, layer + 1
    return tuple(found)


def _of_layer(dtype: str, group: LayerGroup, at: int, heads: Heads) -> Iterator[Extent]:
    first, end = heads
    plane = plane_bytes(dtype, group)
    if end - first == group.kv_heads:
        yield Extent(at, len(group.planes) * plane, 0, 1)
    elif end > first:
        sizes = [group.head_dim * ITEM_BYTES[dtype], *filter(None, [SCALE_BYTES.get(dtype)])]
        for start in range(at, at + len(group.planes) * plane, plane):
            for size in sizes:
                yield Extent(start + first * size, (end - first) * size, group.kv_heads * size, BLOCK_TOKENS)
                start += BLOCK_TOKENS * group.kv_heads * size


def _add(found: list[Extent], extent: Extent) -> None:
    """Appends ``extent``, as one with the last where that ends at its begin."""
    if found and found[-1].count == extent.count == 1 and found[-1].at + found[-1].bytes == extent.at:
        extent = Extent(found[-1].at, found.pop().bytes + extent.bytes, 0, 1)
    found.append(extent)


@functools.lru_cache(maxsize=256)
def common(one: Part, other: Part, page_bytes: int) -> Part:
    """Returns the bytes that are in both parts of a page of ``page_bytes``; () if there are none. Raises
    LayoutMismatch for a part that isn't of such a page.
    """
    return _part(_mask(one, page_bytes) & _mask(other, page_bytes))


@functools.lru_cache(maxsize=256)
def without(part: Part, others: tuple[Part, ...], page_bytes: int) -> Part:
    """Returns the bytes of ``part`` that are in none of the ``others``; () if there are none. Raises LayoutMismatch
    for a part that isn't of such a page.
    """
    left = _mask(part, page_bytes)
    for other in others:
        left &= ~_mask(other, page_bytes)
    return _part(left)


def _mask(part: Part, page_bytes: int) -> np.ndarray:
    """Returns whether each byte of a page is in ``part``, (page_bytes,) bool. Raises LayoutMismatch unless ``part``
    lies within the page: it is written to.
    """
    _require_within(part, page_bytes)
    found = np.zeros(page_bytes, bool)
    for extent in part:
        _rows(found, extent)[:] = True
    return found


def _part(mask: np.ndarray) -> Part:
    """Returns the part of which ``mask`` says for each byte whether it is in it; as few extents as side by side
    ranges of one size and distance allow.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    starts, sizes = edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist()
    found, first = list[Extent](), 0
    while first < len(starts):
        end, size = first + 1, sizes[first]
        stride = starts[end] - starts[first] if end < len(starts) and sizes[end] == size else 0
        while stride and end < len(starts) and sizes[end] == size and starts[end] - starts[end - 1] == stride:
            end += 1
        found.append(Extent(starts[first], size, stride, end - first))
        first = end
    return tuple(found)


def contiguous(page: memoryview, part: Sequence[Extent]) -> memoryview | None:
    """Returns the bytes of ``part`` in ``page`` as a view; None if they don't lie side by side."""
    if len(part) != 1 or part[0].count != 1:
        return None
    return page[part[0].at : part[0].at + part[0].bytes]


def gather(page: memoryview, part: Sequence[Extent]) -> memoryview:
    """Returns the bytes of ``part`` in ``page``, one extent behind the other: a view where they lie so."""
    if (view := contiguous(page, part)) is not None:
        return view
    held, wire, at = np.frombuffer(page, np.uint8), bytearray(part_bytes(part)), 0
    said = np.frombuffer(wire, np.uint8)
    for extent in part:
        size = extent.bytes * extent.count
        said[at : at + size].reshape(extent.count, extent.bytes)[:] = _rows(held, extent)
        at += size
    return memoryview(wire)


def scatter(wire: memoryview, page: memoryview, part: Sequence[Extent]) -> None:
    """Writes the bytes that ``gather`` returned to their places in ``page``."""
    held, said, at = np.frombuffer(page, np.uint8), np.frombuffer(wire, np.uint8), 0
    for extent in part:
        size = extent.bytes * extent.count
        _rows(held, extent)[:] = said[at : at + size].reshape(extent.count, extent.bytes)
        at += size


def _rows(held: np.ndarray, extent: Extent) -> np.ndarray:
    """Returns an extent of the page ``held``, uint8, as a view (count, bytes)."""
    shape, strides = (extent.count, extent.bytes), (extent.stride, 1)
    return np.lib.stride_tricks.as_strided(held[extent.at :], shape, strides)


@functools.lru_cache(maxsize=256)
def require_part(part: Part, page_bytes: int) -> None:
    """Checks that the extents of ``part``, which a peer may have sent, lie within a page of ``page_bytes``, apart.
    Raises LayoutMismatch.
    """
    require_apart((part,), page_bytes)


@functools.lru_cache(maxsize=256)
def require_whole(parts: tuple[Part, ...], page_bytes: int, wanted: Part = ()) -> None:
    """Checks that ``parts`` together are every byte of ``wanted``, () for a page of ``page_bytes``, once. Raises
    LayoutMismatch.
    """
    require_apart(parts, page_bytes)
    size, most = sum(map(part_bytes, parts)), part_bytes(wanted) if wanted else page_bytes
    if size != most or any(without(part, (wanted,), page_bytes) for part in parts if wanted):
        raise LayoutMismatch(f"the parts of {len(parts)} senders have {size} bytes of {most}", FIELD)


def require_apart(parts: Sequence[Part], page_bytes: int) -> None:
    """Checks that ``parts`` lie within a page of ``page_bytes`` and don't overlap. Raises LayoutMismatch."""
    for part in parts:
        if not part:
            raise LayoutMismatch(f"a part of a page of {page_bytes} bytes has none of them", FIELD)
        _require_within(part, page_bytes)
    if sum(map(part_bytes, parts)) > page_bytes:  # before anything is counted byte by byte
        raise LayoutMismatch(f"the parts of {len(parts)} senders are more than a page", FIELD)
    taken = np.zeros(page_bytes, bool)
    for extent in (extent for part in parts for extent in part):
        rows = _rows(taken, extent)
        if rows.any():
            raise LayoutMismatch(f"two parts of a page have byte {extent.at} or one behind it", FIELD)
        rows[:] = True


def _require_within(part: Part, page_bytes: int) -> None:
    if len(part) > MOST_EXTENTS or not all(_lies_within(extent, page_bytes) for extent in part):
        raise LayoutMismatch(f"a part isn't of a page of {page_bytes} bytes, or in too many pieces", FIELD)


def _lies_within(extent: Extent, page_bytes: int) -> bool:
    numbers = extent.at, extent.bytes, extent.stride, extent.count
    if not all(0 <= number <= page_bytes for number in numbers) or not extent.bytes or not extent.count:
        return False
    if extent.count > 1 and extent.stride < extent.bytes:
        return False
    return extent.at + (extent.count - 1) * extent.stride + extent.bytes <= page_bytes
