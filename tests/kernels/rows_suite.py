"""Checks what holds of rms_norm, swiglu and embedding, whichever library they are in; each check takes the library.

Knows nothing of pytest. Each check raises AssertionError where the library is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, F, P, declare
from baton.kernels.geglu.reference import geglu
from baton.kernels.rms_norm.reference import normed


def rms_norm(library: ctypes.CDLL, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    call = declare(library, "rms_norm", P, P, P, F, I64, I64, P)
    room = torch.full((len(x) + 1, x.shape[1]), torch.nan)
    call(
        x.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), eps, *x.shape, room.data_ptr()
    )
    assert bool(torch.isnan(room[len(x)]).all()), "it wrote past its rows"
    return room[: len(x)]


def norms_are_right(library: ctypes.CDLL) -> None:
    for rows, hidden in ((1, 1), (3, 24), (5, 160), (130, 257)):
        x, delta, weight = torch.randn(rows, hidden), torch.randn(rows, hidden), torch.rand(hidden)
        total = x + delta
        for eps in (1e-5, 1.0):
            mine = x.clone()
            found = rms_norm(library, mine, delta, weight, eps)
            wide = total.double()
            wanted = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight
            assert torch.equal(mine, total)
            assert bool(((found - wanted).abs() <= 2e-6 * (wanted.abs() + 1)).all())


def swiglu_is_exact(library: ctypes.CDLL) -> None:
    call = declare(library, "swiglu", P, I64, I64, P)
    for rows, inner in ((1, 1), (3, 17), (9, 200), (70, 640), (2, 4100)):
        x = torch.randn(rows, 2 * inner) * 5
        x[0, 0], x[-1, inner - 1] = -200.0, 90.0
        room = torch.full((rows + 1, inner), torch.nan)
        call(x.data_ptr(), rows, inner, room.data_ptr())
        assert bool(torch.isnan(room[rows]).all()), "it wrote past its rows"
        out = room[:rows]
        gate, up = x.double().chunk(2, -1)
        torch.testing.assert_close(out, (gate / (1 + (-gate).exp()) * up).float(), atol=1e-6, rtol=3e-6)


def geglu_is_exact(library: ctypes.CDLL) -> None:
    call = declare(library, "geglu", P, I64, I64, P)
    for rows, inner in ((1, 1), (3, 17), (9, 200), (70, 640)):
        x = torch.randn(rows, 2 * inner) * 3
        x[0, 0], x[-1, inner - 1] = -200.0, 90.0
        room = torch.full((rows + 1, inner), torch.nan)
        call(x.data_ptr(), rows, inner, room.data_ptr())
        assert bool(torch.isnan(room[rows]).all()), "it wrote past its rows"
        wanted = geglu(x.double())
        torch.testing.assert_close(room[:rows], wanted.float(), atol=2e-6, rtol=3e-6)


def parts_of_rows_are_normed(library: ctypes.CDLL) -> None:
    """Columns in the middle of rows, as one vector each; those beside them stay."""
    call = declare(library, "norm_part", P, I64, I64, I64, P, F)
    for rows, width, first, n in ((1, 40, 0, 40), (5, 90, 24, 48), (70, 700, 8, 500)):
        x, weight = torch.randn(rows, width), torch.rand(n) + 0.5
        mine = x.clone()
        call(mine.data_ptr() + 4 * first, width, rows, n, weight.data_ptr(), 1e-5)
        columns = slice(first, first + n)
        torch.testing.assert_close(mine[:, columns], normed(x[:, columns].double(), weight.double(), 1e-5).float())
        mine[:, columns] = x[:, columns]
        assert torch.equal(mine, x)


def embedding_widens(library: ctypes.CDLL) -> None:
    call = declare(library, "embedding", P, I64, P, I32, I64, P)
    tokens = np.array([36, 0, 5, 5], np.int32)
    for dtype, code in ((torch.float32, native.F32), (torch.bfloat16, native.BF16)):
        for hidden in (24, 7, 1030):
            table, out = torch.randn(37, hidden).to(dtype), torch.full((5, hidden), torch.nan)
            call(tokens.ctypes.data, 4, table.data_ptr(), code, hidden, out.data_ptr())
            assert torch.equal(out[:4], table[torch.from_numpy(tokens).long()].float())
            assert bool(torch.isnan(out[4]).all()), "it wrote past its rows"


def a_rows_bits_are_its_own(library: ctypes.CDLL) -> None:
    """A row's norm is the same alone and beside a row of NaN."""
    x, weight = torch.randn(5, 520), torch.rand(520)
    whole = rms_norm(library, x.clone(), None, weight, 1e-5)
    x[2] = torch.nan
    beside = rms_norm(library, x.clone(), None, weight, 1e-5)
    kept = [0, 1, 3, 4]
    assert torch.equal(beside[kept], whole[kept])
    assert bool(torch.isnan(beside[2]).all())
    assert torch.equal(rms_norm(library, x[3:4].clone(), None, weight, 1e-5), whole[3:4])


CHECKS: tuple[Callable[[ctypes.CDLL], None], ...] = (
    norms_are_right,
    swiglu_is_exact,
    embedding_widens,
    a_rows_bits_are_its_own,
)
