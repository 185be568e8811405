"""Defines torch.ops.baton.lora, which adds one adapter's product to some rows of a layer's outputs.

Knows nothing of checkpoints.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from baton.kernels.abi.native import BF16, F32
from baton.kernels.abi.native import library as native_library
from baton.kernels.abi.torch_library import define, dense, require, runs_natively
from baton.kernels.lora import reference
from baton.kernels.lora.reference import AdaptedRows, LoraMatrices
from baton.kernels.lora.structs import MOST_RANK, LoraGroup, LoraPart, LoraSite, pack_b, panelled, run_lora

CODES = {torch.float32: F32, torch.bfloat16: BF16}


def _fake(out: Tensor, x: Tensor, rows: Tensor, a: Tensor, b: Tensor, scale: float, first: int) -> Tensor:
    rank = a.shape[0]
    require(x.dim() == 2 and a.shape == (rank, x.shape[1]), f"lora: a is (rank, {x.shape[-1]})")
    require(b.dim() == 2 and b.shape[1] == rank, f"lora: b is (outputs, {rank})")
    require(0 < rank <= MOST_RANK, f"lora: rank is 1 to {MOST_RANK}")
    require(0 <= first <= out.shape[1] - b.shape[0], "lora: the outputs lie inside the layer's")
    return out.new_empty(out.shape)


@define("lora(Tensor out, Tensor x, Tensor rows, Tensor a, Tensor b, float scale, int first) -> Tensor", _fake)
def lora(out: Tensor, x: Tensor, rows: Tensor, a: Tensor, b: Tensor, scale: float, first: int) -> Tensor:
    """Returns ``out`` with scale x B · (A · x) added to ``rows``, from output ``first`` on, (all rows, all
    outputs).

    x is (all rows, k), a (rank, k), b (outputs, rank). Raises ValueError for shapes that don't fit.
    """
    _fake(out, x, rows, a, b, scale, first)
    require(len(rows) == 0 or 0 <= int(rows.min()) <= int(rows.max()) < len(out), "lora: rows are those of out")
    if native_library() is None or not runs_natively(out, x) or a.dtype not in CODES or a.dtype != b.dtype:
        return reference.lora(out, x, [AdaptedRows(rows, (LoraMatrices(a, b, scale, first),))])
    return _natively(out.contiguous().clone(), dense(x), rows.int(), a.contiguous(), b, scale, first)


def _natively(out: Tensor, x: Tensor, rows: Tensor, a: Tensor, b: Tensor, scale: float, first: int) -> Tensor:
    (n, rank), stored = b.shape, torch.int16 if b.dtype == torch.bfloat16 else torch.float32
    packed = torch.empty((panelled(n) // 64, rank, 64), dtype=stored)
    pack_b(b.view(stored).numpy(), packed.numpy())
    part = LoraPart(a.data_ptr(), packed.data_ptr(), x.shape[1], first, n, rank, CODES[a.dtype], scale, looked_up=0)
    site = LoraSite(ctypes.addressof(part), 1)
    group = LoraGroup(ctypes.addressof(site), rows.data_ptr(), len(rows))
    run_lora()(ctypes.addressof(group), 1, 0, x.data_ptr(), x.stride(0), None, out.data_ptr(), out.stride(0))
    return out
