"""moe called straight, for tests and measurements. Knows nothing of models."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.abi.native import BF16, F32, I64, P, declare


class ExpertsStruct(ctypes.Structure):
    """moe.h: Moe."""

    _fields_ = (
        *(("gate_up", ctypes.c_void_p), ("down", ctypes.c_void_p)),
        *(("hidden", ctypes.c_int64), ("inner", ctypes.c_int64)),
        *((name, ctypes.c_int32) for name in ("experts", "chosen", "renormalise", "dtype")),
    )


@dataclass(frozen=True)
class Experts:
    """gate_up (experts, 2 inner, hidden), gate first, down (experts, hidden, inner); bfloat16 or float32."""

    gate_up: Tensor
    down: Tensor
    chosen: int
    renormalise: bool = True

    @property
    def struct(self) -> ExpertsStruct:
        """What the library is given."""
        experts, hidden, inner = self.down.shape
        pointers = self.gate_up.data_ptr(), self.down.data_ptr()
        dtype = BF16 if self.down.dtype == torch.bfloat16 else F32
        return ExpertsStruct(*pointers, hidden, inner, experts, self.chosen, int(self.renormalise), dtype)


def moe(library: ctypes.CDLL, experts: Experts, x: Tensor, logits: Tensor, out: Tensor | None = None) -> Tensor:
    """x (rows, hidden) and logits (rows, experts) float32 -> (rows, hidden)."""
    call = declare(library, "moe", P, P, I64, P, I64, P, I64)
    struct = experts.struct
    out = torch.full_like(x, torch.nan) if out is None else out
    call(ctypes.byref(struct), x.data_ptr(), x.stride(0), logits.data_ptr(), len(x), out.data_ptr(), out.stride(0))
    return out
