"""Activations of MLPs without a gate, natively on a CPU. Knows nothing of the products around them.

torch computes the last numbers of a call in another way than the others, so that a row's bits would depend on the
rows beside it; these don't.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, P
from baton.kernels.activate import reference

KINDS = {"gelu_new": 0, "gelu_pytorch_tanh": 0, "relu": 1, "relu2": 2, "silu": 3}  # cpu.cpp: Activation


def activate(x: Tensor, activation: str) -> Tensor:
    """Returns ``activation``, a name of ``reference.ACTIVATIONS``, of each number of ``x`` (rows, width).

    torch computes what the native code lacks: other activations, other dtypes than float32.
    """
    kind = KINDS.get(activation)
    if kind is None or x.dtype != torch.float32 or x.device.type != "cpu" or native.library() is None:
        return reference.activate(x, activation)
    rows, call = x.contiguous(), native.function("activate", I32, P, I64, I64, P)
    out = torch.empty_like(rows)
    call(kind, rows.data_ptr(), *rows.shape, out.data_ptr())
    return out
