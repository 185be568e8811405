"""Checks what holds of baton_linear, whichever library it is in; each check takes the library.

Raises AssertionError.

Two oracles, never mixed: ``exact`` is the same quantized numbers in float64 (tight); quality against the
unquantized weights is the tests' own business.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from baton.kernels.abi import native
from baton.kernels.linear import cpu, reference
from baton.kernels.linear.packed import (
    BF16,
    E4M3_A8,
    E4M3_A16,
    ORDERED,
    W8_OUTLIERS,
    PackedWeight,
    is_weight_only,
    pack_bf16,
    pack_codes,
    pack_e4m3,
    pack_e4m3_groups,
    pack_integers,
    padded,
    quantize,
)
from baton.kernels.linear.rounding import EXACT, WHOLE

FORMS: dict[str, Callable[[Tensor], PackedWeight]] = {
    "bf16": pack_bf16,
    "int8": lambda w: quantize(w, 8, 0),
    "int8 g16": lambda w: quantize(w, 8, 16),
    "int4 g32": lambda w: quantize(w, 4, 32),
    "int4 g128": lambda w: quantize(w, 4, 128),
    "int4 row": lambda w: quantize(w, 4, 0),
    "fp8 row": lambda w: pack_bf16(w.to(torch.float8_e4m3fn), torch.rand(len(w)) + 0.5),
    "int4 g64 mins": lambda w: random_integers(w, 4, 64),
    "int8 g512 mins": lambda w: random_integers(w, 8, 512),
}
# Of a CPU alone.
CPU_FORMS: dict[str, Callable[[Tensor], PackedWeight]] = {
    "codes g16": lambda w: random_codes(w, 16),
    "codes g64": lambda w: random_codes(w, 64),
    "int8 outliers": lambda w: with_outliers(w, 1.5),
    "int4 ordered": lambda w: in_any_order(quantize(w, 4, 32)),
    "int8 ordered mins": lambda w: in_any_order(random_integers(w, 8, 64)),
    "int4 orders mins": lambda w: in_any_order(random_integers(w, 4, 32), 4),
    "e4m3 row": lambda w: pack_e4m3(w.to(torch.float8_e4m3fn), torch.rand(len(w)) + 0.5, E4M3_A16),
    "e4m3 g128": lambda w: random_e4m3(w, 128),
    "e4m3 by e4m3 row": lambda w: beside_e4m3(pack_e4m3(w.to(torch.float8_e4m3fn), torch.rand(len(w)) + 0.5)),
    "e4m3 by e4m3 g128": lambda w: beside_e4m3(random_e4m3(w, 128)),
    "e4m3 by e4m3 g32": lambda w: beside_e4m3(random_e4m3(w, 32)),
    "e4m3 by e4m3 static": lambda w: beside_e4m3(pack_e4m3(w.to(torch.float8_e4m3fn), torch.rand(len(w))), 0.25),
    "int8 by bf16": lambda w: quantize(w, 8, 0).with_bf16_rows(),
    "int8 g512 mins by bf16": lambda w: random_integers(w, 8, 512).with_bf16_rows(),
    "int8 g16 mins by bf16": lambda w: random_integers(w, 8, 16).with_bf16_rows(),
    "int4 g32 by bf16": lambda w: quantize(w, 4, 32).with_bf16_rows(),
    "int4 row by bf16": lambda w: quantize(w, 4, 0).with_bf16_rows(),
    "int4 ordered mins by bf16": lambda w: in_any_order(random_integers(w, 4, 64)).with_bf16_rows(),
    "codes g16 by bf16": lambda w: random_codes(w, 16).with_bf16_rows(),
}
# What rounding on the way may cost, by activations' dtype, as a share of what is added up.
TIGHT = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
SHAPES = ((1, 1), (64, 64), (63, 8), (65, 15), (100, 72), (130, 384), (97, 385), (31, 1040), (200, 769))
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 16, 65)


def random_integers(w: Tensor, bits: int, group: int) -> PackedWeight:
    """Every integer there is, the ends included, with mins."""
    groups = padded(w.shape[1], group) // group
    high = 1 << (bits - 1)
    q = torch.randint(-high, high, w.shape, dtype=torch.int8)
    return pack_integers(q, bits, group, torch.rand(len(w), groups) * 0.1 + 0.01, torch.randn(len(w), groups))


def in_any_order(weight: PackedWeight, orders: int = 1) -> PackedWeight:
    """Returns the same columns, by inputs that lie elsewhere, those of each part of the rows in an order of their
    own; the last part has the first one's again.
    """
    each = [torch.randperm(weight.k, dtype=torch.int32) for _ in range(max(1, orders - 1))]
    table = each[0] if orders == 1 else torch.stack([*each, each[0]])
    return dataclasses.replace(weight, kind=ORDERED[weight.kind], table=table)


def with_outliers(w: Tensor, threshold: float) -> PackedWeight:
    """Rounded to 8 bits, inputs from ``threshold`` on being multiplied in float."""
    return dataclasses.replace(quantize(w, 8, 0), kind=W8_OUTLIERS, table=torch.tensor([threshold]))


def random_codes(w: Tensor, group: int) -> PackedWeight:
    """Every code, a table of any numbers in no order, scales of either sign."""
    codes = torch.randint(0, 16, w.shape, dtype=torch.uint8)
    scales = torch.randn(len(w), padded(w.shape[1], group) // group)
    return pack_codes(codes, torch.randint(-128, 128, (16,)), group, scales)


def random_e4m3(w: Tensor, group: int) -> PackedWeight:
    """Every number there is, subnormal ones among them."""
    numbers = torch.randint(0, 255, w.shape, dtype=torch.uint8)
    numbers = torch.where(numbers & 127 == 127, 0, numbers).view(torch.float8_e4m3fn)
    return pack_e4m3_groups(numbers, group, torch.rand(len(w), padded(w.shape[1], group) // group) + 0.5)


def beside_e4m3(weight: PackedWeight, scale: float = 0.0) -> PackedWeight:
    """Returns the same weight for rows that are rounded to e4m3, by one scale or by their own."""
    return dataclasses.replace(weight, kind=E4M3_A8, table=torch.tensor([scale]))


def forms_of(library: ctypes.CDLL) -> dict[str, Callable[[Tensor], PackedWeight]]:
    """Returns the forms that the library has."""
    return FORMS | CPU_FORMS if hasattr(library, "baton_set_threads") else FORMS


def bound(library: ctypes.CDLL) -> Callable[..., Any]:
    """Returns the library's baton_linear."""
    return native.declare(library, "linear", *cpu.ARGUMENTS)


def exact(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Returns the same numbers in float64."""
    wide = weight.dequantized(torch.float64)
    if weight.kind == E4M3_A8:
        out = reference.published_rows(x.float(), weight).double() @ wide.T
    elif weight.kind in (BF16, E4M3_A16) or is_weight_only(weight.kind):
        out = x.bfloat16().double() @ wide.T
    else:
        x, large = _without_outliers(x.float(), weight)
        q, scale = reference.quantize_rows(x)
        out = (q.double() @ wide.T) * scale.double() + large.double() @ wide.T
    return out if bias is None else out + bias.double()


def _without_outliers(x: Tensor, weight: PackedWeight) -> tuple[Tensor, Tensor]:
    if weight.kind != W8_OUTLIERS:
        return x, torch.zeros_like(x)
    assert weight.table is not None
    return torch.where(x.abs() < weight.table, x, 0), torch.where(x.abs() < weight.table, 0, x)


def off(found: Tensor, wanted: Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def is_the_exact_oracles(library: ctypes.CDLL, form: str, n: int, k: int, m: int, dtype: torch.dtype) -> None:
    """One case, with a bias, from a strided view, into memory with guards around that held NaN."""
    torch.manual_seed(n * 1000 + k * 10 + m)
    weight, bias = forms_of(library)[form](torch.randn(n, k)), torch.randn(n)
    x = (torch.randn(m, k + 5) * torch.rand(m, 1) * 10).to(dtype)[:, 3 : 3 + k]
    error = (guarded(library, x, weight, bias).double() - exact(x, weight, bias)).norm()
    added_up = (x.double().abs() @ weight.dequantized(torch.float64).abs().T + bias.abs()).norm()
    assert float(error / added_up) < TIGHT[dtype], (form, n, k, m, dtype)


def guarded(library: ctypes.CDLL, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Returns the op's result, after checking that memory before, after and between its rows stays NaN."""
    m, n, gap = x.shape[0], weight.n, 3
    memory = torch.full((m + 2, n + gap), torch.nan, dtype=x.dtype)
    code = cpu.CODES[x.dtype]
    at_bias = None if bias is None else bias.data_ptr()
    out = memory[1 : m + 1]
    bound(library)(
        weight.address, x.data_ptr(), code, x.stride(0), m, at_bias, out.data_ptr(), code, memory.stride(0)
    )
    assert bool(memory[0].isnan().all()), "wrote before its rows"
    assert bool(memory[m + 1].isnan().all()), "wrote after its rows"
    assert bool(out[:, n:].isnan().all()), "wrote between its rows"
    assert not bool(out[:, :n].isnan().any()), "left outputs unwritten"
    return out[:, :n].clone()


def every_form_and_shape(library: ctypes.CDLL) -> None:
    """Compares every form at every shape with the oracle."""
    for number, (n, k) in enumerate(SHAPES):
        for form in forms_of(library):
            is_the_exact_oracles(library, form, n, k, ROWS[(number * 7) % len(ROWS)], torch.float32)
        is_the_exact_oracles(library, "int8", n, k, 3, torch.bfloat16)


def rows_do_not_depend_on_company(library: ctypes.CDLL, most: int = 140) -> None:
    """A row's bits are the same at m = 1 and at any m, wherever it stands, whatever the number of threads."""
    linear = bound(library)
    for form in forms_of(library):
        torch.manual_seed(7)
        weight, x = forms_of(library)[form](torch.randn(66, 1000)), torch.randn(most, 1000)
        set_threads(library, 1)
        alone = torch.cat([cpu.run(linear, x[i : i + 1], weight) for i in range(0, most, 46)])
        for threads in (1, 2, 5):
            if not set_threads(library, threads) and threads > 1:
                continue
            for m in (2, 5, 16, 70, most):
                together = cpu.run(linear, x[:m], weight)[::46]
                assert torch.equal(together, alone[: len(together)]), (form, m, threads)
    set_threads(library, 2)


def few_rows_do_not_depend_on_company(library: ctypes.CDLL) -> None:
    """Each of two to nine rows has the bits that it has alone: few rows have inner loops by their number."""
    linear = bound(library)
    for form in forms_of(library):
        torch.manual_seed(11)
        weight, x = forms_of(library)[form](torch.randn(66, 700)), torch.randn(9, 700)
        alone = torch.cat([cpu.run(linear, row[None], weight) for row in x])
        for m in range(2, 10):
            assert torch.equal(cpu.run(linear, x[:m], weight), alone[:m]), (form, m)


def set_threads(library: ctypes.CDLL, count: int) -> bool:
    """Sets the number of threads; returns False if the library has none of its own."""
    if not hasattr(library, "baton_set_threads"):
        return False
    library.baton_set_threads(count)
    return True


def bad_rows_stay_alone(library: ctypes.CDLL) -> None:
    """NaN and infinity make their own row not finite, and change no bit of the others; zero rows are zero."""
    linear = bound(library)
    for form in forms_of(library):
        torch.manual_seed(3)
        weight, x = forms_of(library)[form](torch.randn(66, 200)), torch.randn(9, 200)
        x[7] = 0
        clean = cpu.run(linear, x, weight)
        assert not bool(clean[7].any()), form
        x[2, 199], x[4, 11], x[5, 0] = torch.nan, torch.inf, -torch.inf
        found = cpu.run(linear, x, weight)
        rest = [0, 1, 3, 6, 7, 8]
        assert torch.equal(found[rest], clean[rest]), form
        assert not bool(found[[2, 4, 5]].isfinite().all(1).any()), form


def nothing_of_earlier_calls_is_left(library: ctypes.CDLL) -> None:
    """Scratch memory full of a larger call's remains changes nothing: inputs past k count as zero."""
    linear = bound(library)
    torch.manual_seed(5)
    weight, x = FORMS["int4 g64 mins"](torch.randn(64, 70)), torch.randn(5, 70)
    for m in (1, 5):
        for _ in range(2):
            cpu.run(linear, torch.full((40, 900), 9.0), quantize(torch.randn(64, 900), 8, 0))
            assert off(cpu.run(linear, x[:m], weight), exact(x[:m], weight)) < 3e-6


def threads_finish_before_it_returns(library: ctypes.CDLL) -> None:
    """Checks that no row is multiplied before both threads have rounded theirs, by calls of two inputs in turn."""
    weight, linear = FORMS["int8"](torch.randn(128, 4000)), bound(library)
    inputs = [torch.randn(12, 4000) for _ in range(2)]
    library.baton_set_threads(1)
    wanted = [cpu.run(linear, x, weight) for x in inputs]
    library.baton_set_threads(2)
    for turn in range(100):
        assert torch.equal(cpu.run(linear, inputs[turn % 2], weight), wanted[turn % 2])


def inputs_may_be_many(library: ctypes.CDLL) -> None:
    """More of them than a tile of rows goes through at once, on any ISA: against the oracle, and in company."""
    many_inputs_hold(library, ("bf16", "int8", "int4 g32", "int8 g512 mins"))


def inputs_of_every_form_may_be_many(library: ctypes.CDLL) -> None:
    """The same of all forms."""
    many_inputs_hold(library, forms_of(library))


def many_inputs_hold(library: ctypes.CDLL, forms: Iterable[str]) -> None:
    linear = bound(library)
    for form in forms:
        is_the_exact_oracles(library, form, 67, 8264, 7, torch.float32)
        weight, x = forms_of(library)[form](torch.randn(66, 8264)), torch.randn(140, 8264)
        together = cpu.run(linear, x, weight)
        for m in (1, 3, 9, 50):
            assert torch.equal(together[77 : 77 + m], cpu.run(linear, x[77 : 77 + m], weight)), (form, m)


def sums_are_exact_at_their_largest(library: ctypes.CDLL) -> None:
    """Whole scales of 15 and -15 and the largest of weights and activations: whole numbers up to EXACT inputs, two
    such rounded once, then float32 sums one after the other, in any company.
    """
    torch.manual_seed(9)
    linear, n, k = bound(library), 66, 4 * EXACT + 1152
    x = 127.0 - torch.randint(0, 2, (140, k))
    x[:, 5] = 127
    for group in (32, 128):
        signs = torch.ones(n, k // group).index_fill_(0, torch.arange(0, n, 3), -1.0)
        weight = whole_weight(torch.randint(-8, -6, (n, k), dtype=torch.int8), group, signs * WHOLE)
        wide, wanted = weight.dequantized(torch.float64), torch.zeros(140, n)
        for start in range(0, k, 2 * EXACT):
            wanted += (x[:, start : start + 2 * EXACT].double() @ wide[:, start : start + 2 * EXACT].T).float()
        for m in (1, 3, 9, 140):
            assert torch.equal(cpu.run(linear, x[:m], weight), wanted[:m]), (group, m)


def whole_weight(q: Tensor, group: int, scales: Tensor) -> PackedWeight:
    """q (n, k) of 4 bits with whole scales (n, groups), as `quantize` would give it, each row's unit 1."""
    packed = pack_integers(q, 4, group, scales)
    assert packed.row_scale is not None
    panels = torch.zeros(len(packed.row_scale), scales.shape[1]).index_copy_(0, torch.arange(len(q)), scales)
    return dataclasses.replace(
        packed,
        scales=panels.view(-1, 64, scales.shape[1]).transpose(1, 2).half().contiguous(),
        row_scale=torch.ones_like(packed.row_scale),
    )


# Of any device; then of a CPU alone.
SHARED_CHECKS: tuple[Callable[[ctypes.CDLL], None], ...] = (
    every_form_and_shape,
    rows_do_not_depend_on_company,
    bad_rows_stay_alone,
    nothing_of_earlier_calls_is_left,
)
CHECKS = (
    *SHARED_CHECKS,
    few_rows_do_not_depend_on_company,
    inputs_may_be_many,
    sums_are_exact_at_their_largest,
    threads_finish_before_it_returns,
)
