"""Checks what holds of products with a norm before them or a gate in their epilogue.

Each check takes a library with linear, rms_norm and swiglu.

Knows nothing of pytest. Each check raises AssertionError where the library is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.abi.native import F32, I32, I64, F, P, declare
from baton.kernels.linear import cpu
from baton.kernels.linear.packed import PackedWeight
from tests.kernels import linear_suite

# outputs of the gate, inputs, rows: whole tiles and others, a block of rows and several, a chunk of inputs and two
SHAPES = ((64, 40, 33), (128, 1096, 50), (192, 520, 140), (64, 4200, 77))
APART = ("outliers", "order")  # forms that are multiplied in parts: none of them has a gate in its epilogue


def both(library: ctypes.CDLL, x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the gated product by the two ops one after the other."""
    product = cpu.run(linear_suite.bound(library), x, weight, bias).float()
    out = torch.empty(len(x), weight.n // 2)
    declare(library, "swiglu", P, I64, I64, P)(product.data_ptr(), *out.shape, out.data_ptr())
    return out.to(dtype)


def gated(
    library: ctypes.CDLL, x: Tensor, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Returns the gated product, or None if the library leaves it to the two ops; memory around it stays NaN."""
    call = declare(library, "linear_gated", *cpu.ARGUMENTS, result=I32)
    m, n, gap = len(x), weight.n // 2, 6
    room = torch.full((m + 2, n + gap), torch.nan, dtype=dtype)
    out, add = room[1 : m + 1], None if bias is None else bias.data_ptr()
    place = out.data_ptr(), cpu.CODES[dtype], n + gap
    done = call(weight.address, x.data_ptr(), cpu.CODES[x.dtype], x.stride(0), m, add, *place)
    assert bool(room[0].isnan().all()), "wrote before its rows"
    assert bool(room[m + 1].isnan().all()), "wrote after its rows"
    assert bool(out[:, n:].isnan().all()), "wrote between its rows"
    assert done or bool(out.isnan().all()), "wrote what it leaves to others"
    return out[:, :n].clone() if done else None


class NormedRows(ctypes.Structure):
    """Mirrors NormedRows of rms_norm/normed.h."""

    _fields_ = [("x", P), ("delta", P), ("weight", P), ("eps", F)]


EPS = 1e-5


def norm_after_norm(library: ctypes.CDLL, x: Tensor, delta: Tensor | None, scale: Tensor) -> Tensor:
    """Returns the norm of x + delta, and leaves that sum in x."""
    out, add = torch.empty_like(x), None if delta is None else delta.data_ptr()
    call = declare(library, "rms_norm", P, P, P, F, I64, I64, P)
    call(x.data_ptr(), add, scale.data_ptr(), EPS, *x.shape, out.data_ptr())
    return out


def normed(
    library: ctypes.CDLL,
    x: Tensor,
    delta: Tensor | None,
    scale: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    halves: bool,
) -> Tensor | None:
    """Returns the product of the norms, gated if ``halves``, or None if the library leaves it to others."""
    call = declare(library, "linear_normed", P, P, I64, P, I32, P, I32, I64, result=I32)
    n, before = weight.n // 2 if halves else weight.n, x.clone()
    room = torch.full((len(x) + 2, n + 6), torch.nan)
    rows = NormedRows(x.data_ptr(), None if delta is None else delta.data_ptr(), scale.data_ptr(), EPS)
    add = None if bias is None else bias.data_ptr()
    done = call(weight.address, ctypes.addressof(rows), len(x), add, halves, room[1:].data_ptr(), F32, n + 6)
    assert done or (bool(room.isnan().all()) and torch.equal(x, before)), "wrote what it leaves to others"
    assert bool(room[[0, -1]].isnan().all()), "wrote around its rows"
    assert bool(room[:, n:].isnan().all()), "wrote between its rows"
    return room[1:-1, :n].clone() if done else None


def norms_within_a_product_change_no_bit(library: ctypes.CDLL) -> None:
    """Forms of weights that tiles multiply, with the gate and without; the sums of x and delta are left in x."""
    by_tiles = hasattr(library, "baton_amx_users")
    for number, (inner, k, m) in enumerate(SHAPES):
        linear_suite.set_threads(library, 1 + number % 3)
        for form in ("bf16", "int8", "int4 g32", "int4 g128"):
            torch.manual_seed(number)
            weight, scale = linear_suite.FORMS[form](torch.randn(2 * inner, k)), torch.randn(k)
            bias = torch.randn(2 * inner) if number % 2 else None
            for halves in (False, True):
                x, delta = torch.randn(m, k), torch.randn(m, k) if number != 1 else None
                same = x.clone()
                found = normed(library, x, delta, scale, weight, bias, halves)
                assert found is not None or not by_tiles or form.startswith("int4"), (form, m)
                if found is None:
                    continue
                rows = norm_after_norm(library, same, delta, scale)
                wanted = (
                    both(library, rows, weight, bias, torch.float32)
                    if halves
                    else cpu.run(linear_suite.bound(library), rows, weight, bias)
                )
                assert torch.equal(x, same), (form, inner, k, m)
                assert torch.equal(found, wanted), (form, inner, k, m, halves)
    linear_suite.set_threads(library, 2)


def it_has_the_bits_of_both_ops(library: ctypes.CDLL) -> None:
    """Every form of weights, with biases and without, rows and results in float32 and bf16, one thread and more."""
    for number, (inner, k, m) in enumerate(SHAPES):
        linear_suite.set_threads(library, 1 + number % 3)
        for form, pack in linear_suite.forms_of(library).items():
            if any(part in form for part in APART):
                continue
            torch.manual_seed(number)
            weight = pack(torch.randn(2 * inner, k))
            bias = torch.randn(2 * inner) if number % 2 else None
            for dtype, result in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16)):
                x = torch.randn(m, k).to(dtype)
                found = gated(library, x, weight, bias, result)
                assert found is not None, (form, m)
                assert torch.equal(found, both(library, x, weight, bias, result)), (form, inner, k, m, result)
    linear_suite.set_threads(library, 2)


def a_row_of_nan_stays_alone(library: ctypes.CDLL) -> None:
    """Infinity and NaN change no bit of other rows."""
    for form in ("bf16", "int8", "int4 g32"):
        weight, x = linear_suite.FORMS[form](torch.randn(128, 200)), torch.randn(40, 200)
        clean = gated(library, x, weight, None, torch.float32)
        x[7, 3], x[21, 199] = torch.nan, torch.inf
        found = gated(library, x, weight, None, torch.float32)
        assert clean is not None
        assert found is not None
        rest = [row for row in range(40) if row not in (7, 21)]
        assert torch.equal(found[rest], clean[rest]), form
        assert bool(found[7].isnan().all()), form


def few_rows_and_odd_halves_are_left_to_two_ops(library: ctypes.CDLL) -> None:
    """Few rows, gates that are no whole panels, and weights that are multiplied in parts."""
    forms = linear_suite.forms_of(library)
    for form, inner, m in (("int8", 64, 4), ("bf16", 96, 50), ("int8 outliers", 64, 50), ("int4 ordered", 64, 50)):
        weight = forms[form](torch.randn(2 * inner, 128))
        assert gated(library, torch.randn(m, 128), weight, None, torch.float32) is None, (form, inner, m)


CHECKS: tuple[Callable[[ctypes.CDLL], None], ...] = (
    it_has_the_bits_of_both_ops,
    a_row_of_nan_stays_alone,
    few_rows_and_odd_halves_are_left_to_two_ops,
    norms_within_a_product_change_no_bit,
)
