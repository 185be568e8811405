"""Checks what holds of baton_dense over float32 and float16 weights, in any library; each check takes the library.

Knows nothing of pytest. Each check raises AssertionError where the library is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.abi.native import I64, P, declare
from baton.kernels.linear.packed import PackedWeight
from baton.kernels.linear.packed_floats import pack_f16, pack_f32, unpack_f32

SHAPES = ((1, 1), (63, 24), (64, 256), (65, 257), (200, 1000))
DEPTHS = (1, 192, 193, 240, 383, 384, 600, 1200)
ROWS = 400


def dense(library: ctypes.CDLL, weight: PackedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns the product of one call, after checking that what lies between its rows stays NaN."""
    call = declare(library, "dense", P, P, I64, I64, P, P, I64)
    out = torch.full((len(x), weight.n + 3), torch.nan)
    at_bias = None if bias is None else bias.data_ptr()
    call(weight.address, x.data_ptr(), x.stride(0), len(x), at_bias, out.data_ptr(), out.stride(0))
    assert bool(torch.isnan(out[:, weight.n :]).all()), "it wrote past its columns"
    return out[:, : weight.n]


def is_close_and_a_rows_bits_are_its_own(library: ctypes.CDLL, n: int, k: int) -> None:
    """Compares with float64; a row has the same bits alone, in the middle and at the end of a batch."""
    weight, bias = torch.randn(n, k), torch.randn(n)
    packed, x = pack_f32(weight), torch.randn(ROWS, k)
    whole = dense(library, packed, x, bias)
    exact = x.double() @ weight.double().T + bias
    assert float((whole - exact).norm() / exact.norm()) < 1e-6
    for begin, end in ((0, 1), (7, 13), (390, 400), (191, 194)):
        assert torch.equal(dense(library, packed, x[begin:end], bias), whole[begin:end])


def adds_bias_and_chains_in_order(library: ctypes.CDLL, k: int, biased: bool) -> None:
    """Chains of 192 inputs, of fewer than 384 the half: each multiply-add rounds once, each chain is added once."""
    weight, x = torch.randn(70, k), torch.randn(9, k)
    bias = torch.randn(70) if biased else None
    chain = k // 2 if 192 < k < 384 else 192
    wanted = torch.zeros(9, 70) if bias is None else bias.expand(9, 70)
    for begin in range(0, k, chain):
        total = torch.zeros(9, 70)
        for at in range(begin, min(begin + chain, k)):
            total = (total.double() + x[:, at, None].double() * weight[:, at].double()).float()
        wanted = wanted + total
    same = (dense(library, pack_f32(weight), x, bias) == wanted).float().mean()
    assert float(same) > 0.99, "rounding by way of double may differ from a fused multiply-add, hardly ever"


def every_shape(library: ctypes.CDLL) -> None:
    """All of the above, walked."""
    for n, k in SHAPES:
        is_close_and_a_rows_bits_are_its_own(library, n, k)
    for k in DEPTHS:
        adds_bias_and_chains_in_order(library, k, k % 2 == 0)


def a_bad_row_stays_alone(library: ctypes.CDLL) -> None:
    """NaN and infinity change no bit of other rows."""
    for rows in (3, 40):
        packed, x = pack_f32(torch.randn(66, 300)), torch.randn(rows, 300)
        clean = dense(library, packed, x)
        x[1, 299], x[1, 7] = torch.nan, torch.inf
        found = dense(library, packed, x)
        rest = [row for row in range(rows) if row != 1]
        assert torch.equal(found[rest], clean[rest])
        assert bool(found[1].isnan().all())


def halves_are_multiplied_as_the_floats_that_they_stand_for(library: ctypes.CDLL) -> None:
    """Values of every magnitude of float16, subnormal ones included, give the bits of float32 weights."""
    for n, k in ((1, 1), (65, 257), (130, 600)):
        weight = (torch.randn(n, k) * torch.exp2(torch.randint(-20, 12, (n, k)).float())).half()
        packed, x, bias = pack_f16(weight), torch.randn(33, k), torch.randn(n)
        assert torch.equal(unpack_f32(packed), weight.float())
        for rows in (1, 2, 7, 33):
            found = dense(library, packed, x[:rows], bias)
            assert torch.equal(found, dense(library, pack_f32(weight), x[:rows], bias)), (n, k, rows)


# Of a CPU alone, beside CHECKS.
HALVES: tuple[Callable[[ctypes.CDLL], None], ...] = (halves_are_multiplied_as_the_floats_that_they_stand_for,)
CHECKS: tuple[Callable[[ctypes.CDLL], None], ...] = (every_shape, a_bad_row_stays_alone)
