"""Reads ggml's blocks of quantized weights (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h) as
integers, codes and scales. Knows nothing of files.

A reader takes (blocks, bytes of a block) uint8, all rows' blocks in order, and the number of rows. Values of a
block of 32 are stored in two halves: sixteen low nibbles, then sixteen high ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.linear.codes import Codes, e2m1
from baton.kernels.linear.integers import Integers, Part

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml-common.h: kvalues_iq4nl
E8M0_BIAS = 127  # of OCP Microscaling's scales: 2^(e - 127)


def _half(raw: Tensor) -> Tensor:
    """Returns float32 (blocks, count) of the float16 numbers in (blocks, 2 x count bytes)."""
    return raw.contiguous().view(torch.float16).float()


def _halves(qs: Tensor) -> Tensor:
    """Returns (blocks, 2 x bytes) nibbles of (blocks, bytes): the low ones, then the high ones."""
    return torch.cat((qs & 15, qs >> 4), 1)


def _fifth(high: Tensor) -> Tensor:
    """Returns (blocks, 32) of (blocks, 4) bytes: each bit, from the lowest up, as 16 or 0."""
    return ((high[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1) << 4


def _small(q: Tensor, zero: int, bits: int, n: int, scale: Tensor, least: Tensor | None = None) -> Integers:
    """Returns the weight of blocks of 32 with value = scale x q + least; ``q`` counts from 0, and is stored less
    ``zero``.
    """
    mins = None if least is None else (-zero * scale - least).view(n, -1)
    return Integers((q.to(torch.int8) - zero).view(n, -1), bits, 32, scale.view(n, -1), mins)


def q4_0(blocks: Tensor, n: int) -> Integers:
    """Returns the weight of ``n`` rows in Q4_0 ``blocks`` (blocks, 18) uint8: value = d x (q - 8); d, sixteen bytes
    of nibbles.
    """
    return _small(_halves(blocks[:, 2:]), 8, 4, n, _half(blocks[:, :2]))


def q4_1(blocks: Tensor, n: int) -> Integers:
    """Returns the weight of ``n`` rows in Q4_1 ``blocks`` (blocks, 20) uint8: value = d x q + m; d, m, sixteen
    bytes of nibbles.
    """
    d, m = _half(blocks[:, :4]).split(1, 1)
    return _small(_halves(blocks[:, 4:]), 8, 4, n, d, m)


def q5_0(blocks: Tensor, n: int) -> Integers:
    """Returns the weight of ``n`` rows in Q5_0 ``blocks`` (blocks, 22) uint8: value = d x (q - 16); d, fifth bits,
    sixteen bytes of nibbles.
    """
    return _small(_halves(blocks[:, 6:]) | _fifth(blocks[:, 2:6]), 16, 8, n, _half(blocks[:, :2]))


def q5_1(blocks: Tensor, n: int) -> Integers:
    """Returns the weight of ``n`` rows in Q5_1 ``blocks`` (blocks, 24) uint8: value = d x q + m; d, m, fifth bits,
    sixteen bytes of nibbles.
    """
    d, m = _half(blocks[:, :4]).split(1, 1)
    return _small(_halves(blocks[:, 8:]) | _fifth(blocks[:, 4:8]), 16, 8, n, d, m)


def q8_0(blocks: Tensor, n: int) -> Integers:
    """Returns the weight of ``n`` rows in Q8_0 ``blocks`` (blocks, 34) uint8: value = d x q; d, 32 bytes."""
    q = blocks[:, 2:].contiguous().view(torch.int8)
    return Integers(q.view(n, -1), 8, 32, _half(blocks[:, :2]).view(n, -1))


def iq4_nl(blocks: Tensor, n: int) -> Codes:
    """Returns the weight of ``n`` rows in IQ4_NL ``blocks`` (blocks, 18) uint8: value = d x table[code]; d, sixteen
    bytes of nibbles.
    """
    table = torch.tensor(IQ4, dtype=torch.float32)
    return Codes(_halves(blocks[:, 2:]).view(n, -1), table, 32, _half(blocks[:, :2]).view(n, -1))


def iq4_xs(blocks: Tensor, n: int) -> Codes:
    """Returns the weight of ``n`` rows in IQ4_XS ``blocks`` (blocks, 136) uint8, each of 256 inputs.

    A block has d, the two high bits of eight scales, their four low bits, and eight runs of 16 bytes of nibbles.
    """
    high = blocks[:, 2:4].contiguous().view(torch.int16).int()
    tops = (high >> torch.arange(0, 16, 2, dtype=torch.int32)) & 3
    lows = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).flatten(1).int()
    scales = _half(blocks[:, :2]) * ((lows | (tops << 4)) - 32)
    codes = _halves(blocks[:, 8:].reshape(-1, 16))
    return Codes(codes.view(n, -1), torch.tensor(IQ4, dtype=torch.float32), 32, scales.view(n, -1))


def mxfp4(blocks: Tensor, n: int) -> Codes:
    """Returns the weight of ``n`` rows in MXFP4 ``blocks`` (blocks, 17) uint8: value = 2^(e - 127) x E2M1; e,
    sixteen bytes of nibbles.
    """
    scales = torch.exp2(blocks[:, 0].float() - E8M0_BIAS)
    return e2m1(_halves(blocks[:, 1:]).view(n, -1), 32, scales.view(n, -1))


def _pairs(raw: Tensor) -> Tensor:
    """Returns (blocks, 128 x halves) numbers of (blocks, 32 bytes x halves): of each 32 bytes the bits 0–1, then
    2–3, 4–5, 6–7.
    """
    runs = raw.reshape(len(raw), -1, 1, 32)
    return ((runs >> torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]) & 3).flatten(1)


def q2_k(blocks: Tensor, n: int) -> Integers:
    """Returns the weight of ``n`` rows in Q2_K ``blocks`` (blocks, 84) uint8, each of 256 inputs.

    A block has sixteen bytes with a scale (low) and a minimum (high), two bits of each input, d, dmin.
    """
    d, dmin = _half(blocks[:, 80:]).split(1, 1)
    scales, mins = d * (blocks[:, :16] & 15), dmin * (blocks[:, :16] >> 4)
    return Integers(
        _pairs(blocks[:, 16:80]).to(torch.int8).view(n, -1), 4, 16, scales.view(n, -1), mins.view(n, -1)
    )


def q3_k(blocks: Tensor, n: int) -> Integers:
    """Returns the weight of ``n`` rows in Q3_K ``blocks`` (blocks, 110) uint8, each of 256 inputs.

    A block has the third bits (32 bytes), two low bits of each input, sixteen scales of 6 bits, d.
    """
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    thirds = ((blocks[:, :32, None].transpose(1, 2) >> bits) & 1).flatten(1)
    q = (_pairs(blocks[:, 32:96]) | (thirds << 2)).to(torch.int8) - 4
    low = torch.cat((blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4), 1)
    high = ((blocks[:, 104:108, None].transpose(1, 2) >> (2 * bits[:4])) & 3).flatten(1)
    scales = _half(blocks[:, 108:]) * ((low | (high << 4)).float() - 32)
    return Integers(q.view(n, -1), 4, 16, scales.view(n, -1))


def _eight(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns eight scales and eight minimums of 6 bits each from (blocks, 12 bytes)."""
    low, high, both = packed.view(-1, 3, 4).unbind(1)
    scale = torch.cat((low & 63, (both & 15) | ((low >> 6) << 4)), 1)
    return scale, torch.cat((high & 63, (both >> 4) | ((high >> 6) << 4)), 1)


def _nibble_runs(qs: Tensor) -> Tensor:
    """Returns (blocks, 256) nibbles of (blocks, 128 bytes): four runs of 32 bytes, each its low nibbles, then its
    high ones.
    """
    runs = qs.reshape(-1, 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), 2).flatten(1)


def _k(q: Tensor, zero: int, bits: int, n: int, head: Tensor, packed: Tensor) -> Integers:
    """Returns the weight of groups of 32 with 6-bit scales and minimums; ``head`` is d and dmin."""
    d, dmin = _half(head).split(1, 1)
    scale, least = _eight(packed)
    scales = (d * scale).view(n, -1)
    mins = (dmin * least).view(n, -1) - zero * scales
    return Integers((q.to(torch.int8) - zero).view(n, -1), bits, 32, scales, mins)


def q4_k(blocks: Tensor, n: int) -> Integers:
    """Returns the weight of ``n`` rows in Q4_K ``blocks`` (blocks, 144) uint8, each of 256 inputs: d, dmin, scales
    and minimums, nibbles.
    """
    return _k(_nibble_runs(blocks[:, 16:]), 8, 4, n, blocks[:, :4], blocks[:, 4:16].contiguous())


def q5_k(blocks: Tensor, n: int) -> Integers:
    """Returns the weight of ``n`` rows in Q5_K ``blocks`` (blocks, 176) uint8, each of 256 inputs.

    A block has d, dmin, scales and minimums, the fifth bits (32 bytes, bit i is that of the i-th group of 32
    inputs), nibbles.
    """
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    fifths = ((blocks[:, 16:48, None].transpose(1, 2) >> bits) & 1).flatten(1)
    q = _nibble_runs(blocks[:, 48:]) | (fifths << 4)
    return _k(q, 16, 8, n, blocks[:, :4], blocks[:, 4:16].contiguous())


def q6_k(blocks: Tensor, n: int) -> Integers:
    """Returns the weight of ``n`` rows in Q6_K ``blocks`` (blocks, 210) uint8, each of 256 inputs.

    A block has two halves of 64 bytes of low nibbles, two of 32 bytes of two high bits, 16 scales, d.
    """
    low = blocks[:, :128].view(-1, 2, 2, 32)
    nibbles = torch.cat((low & 15, low >> 4), 2).flatten(1)  # rows of 32: inputs 0, 32, 64, 96 of the half
    q = (nibbles | (_pairs(blocks[:, 128:192]) << 4)).to(torch.int8) - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Integers(q.view(n, -1), 8, 16, scales.view(n, -1))


# By ggml's name of the kind: bytes of a block, and its reader.
KINDS: dict[str, tuple[int, Callable[[Tensor, int], Part]]] = {
    "Q4_0": (18, q4_0),
    "Q4_1": (20, q4_1),
    "Q5_0": (22, q5_0),
    "Q5_1": (24, q5_1),
    "Q8_0": (34, q8_0),
    "Q2_K": (84, q2_k),
    "Q3_K": (110, q3_k),
    "Q4_K": (144, q4_k),
    "Q5_K": (176, q5_k),
    "Q6_K": (210, q6_k),
    "IQ4_NL": (18, iq4_nl),
    "IQ4_XS": (136, iq4_xs),
    "MXFP4": (17, mxfp4),
}
