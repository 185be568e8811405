"""Codes one run of 16 tokens for the wire: in 8 bits with a scale per row, or in 4 bits per channel. Torch-free.

Knows nothing of pages' owners or of negotiation (bridge.py). ``int4`` follows KIVI
(https://arxiv.org/abs/2402.02750): keys have outliers in few channels, the same for all tokens, so a group of keys
is one channel over the run's 16 tokens, and a group of values all channels of one token and head. The sixteen
levels of a group are evenly spaced from its least to its largest number:

    int8, fp8   [scales, float32, of each (layer, plane, token, head)][codes, a byte each]
    int4        by layer, plane: [least, float16, of each group][step, float16][codes, the first in the low nibble]
"""

from __future__ import annotations

import numpy as np

from baton.kv.layout.codecs import CODECS, SCALE_BYTES, ByteArray, Floats, compress, expand
from baton.protos.nouns import BLOCK_TOKENS, LayerGroup

INT4 = "int4"
NAMES = (*CODECS, INT4)
VALUES = "v"  # the plane that int4 quantizes token by token
STEPS = 15  # the largest code of 4 bits
HALF_MAX = 65504.0  # the largest float16
ITEM = np.dtype("<f2")


def coded_bytes(codec: str, group: LayerGroup) -> int:
    """Returns the bytes that ``codec`` needs for one run of 16 tokens of ``group``."""
    rows = group.layers * len(group.planes) * BLOCK_TOKENS * group.kv_heads
    if codec != INT4:
        return rows * (SCALE_BYTES + group.head_dim)
    return group.layers * sum(_plane_bytes(plane, group) for plane in group.planes)


def encode(codec: str, values: Floats, group: LayerGroup) -> bytes:
    """Returns a run's ``values`` of ``group``, float32 [layer][plane][token][head][head_dim], coded by ``codec``
    ("int8", "fp8" or "int4").
    """
    if codec != INT4:
        scales, coded = compress(values.reshape(-1, group.head_dim), CODECS[codec])
        return scales.tobytes() + coded.tobytes()
    shaped = values.reshape(group.layers, len(group.planes), BLOCK_TOKENS, group.kv_heads, group.head_dim)
    return b"".join(
        _encoded_plane(shaped[layer, at], _axis(plane))
        for layer in range(group.layers)
        for at, plane in enumerate(group.planes)
    )


def decode(codec: str, wire: memoryview, group: LayerGroup) -> Floats:
    """Returns approximately the values that were given to ``encode``, float32 (layer x plane x token x head,
    head_dim).
    """
    if codec != INT4:
        rows = len(wire) // (SCALE_BYTES + group.head_dim)
        scales = np.frombuffer(wire[: rows * SCALE_BYTES], np.float32)
        coded = np.frombuffer(wire[rows * SCALE_BYTES :], np.uint8).reshape(rows, group.head_dim)
        return expand(scales, coded, CODECS[codec])
    planes, at = list[Floats](), 0
    for plane in group.planes * group.layers:
        size = _plane_bytes(plane, group)
        planes.append(_decoded_plane(wire[at : at + size], plane, group))
        at += size
    return np.concatenate(planes).reshape(-1, group.head_dim)


def _axis(plane: str) -> int:
    """Returns the axis of (token, head, head_dim) along which a group of the plane extends."""
    return 2 if plane == VALUES else 0


def _groups(plane: str, group: LayerGroup) -> tuple[int, int, int]:
    """Returns the shape of a plane's steps."""
    whole = [BLOCK_TOKENS, group.kv_heads, group.head_dim]
    whole[_axis(plane)] = 1
    return whole[0], whole[1], whole[2]


def _plane_bytes(plane: str, group: LayerGroup) -> int:
    count = BLOCK_TOKENS * group.kv_heads * group.head_dim
    return 2 * ITEM.itemsize * int(np.prod(_groups(plane, group))) + count // 2


def _encoded_plane(values: Floats, axis: int) -> bytes:
    held = np.clip(values, -HALF_MAX, HALF_MAX)
    least = held.min(axis, keepdims=True).astype(ITEM)
    steps = ((held.max(axis, keepdims=True) - least) / STEPS).astype(ITEM)
    width = steps.astype(np.float32)
    codes = np.rint((held - least) / np.where(width > 0, width, np.inf))
    packed = np.clip(np.nan_to_num(codes), 0, STEPS).astype(np.uint8).reshape(-1, 2)
    return least.tobytes() + steps.tobytes() + (packed[:, 0] | packed[:, 1] << 4).tobytes()


def _decoded_plane(wire: memoryview, plane: str, group: LayerGroup) -> Floats:
    shape, size = _groups(plane, group), int(np.prod(_groups(plane, group))) * ITEM.itemsize
    least, steps = (np.frombuffer(part, ITEM).reshape(shape) for part in (wire[:size], wire[size : 2 * size]))
    codes: ByteArray = np.frombuffer(wire[2 * size :], np.uint8)
    whole = np.stack((codes & 15, codes >> 4), 1).reshape(BLOCK_TOKENS, group.kv_heads, group.head_dim)
    found: Floats = least.astype(np.float32) + whole * steps.astype(np.float32)
    return found
