"""Runs linear natively for packed weights, and by torch for plain tensors. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, NativeFunction, P
from baton.kernels.abi.torch_library import require
from baton.kernels.linear import reference
from baton.kernels.linear.packed import E4M3, PackedWeight
from baton.kernels.linear.packed_floats import unpack_f32
from baton.kernels.step.structs import LINEAR_F16, LINEAR_F32

ARGUMENTS = (P, P, I32, I64, I64, P, P, I32, I64)
FLOATS = (LINEAR_F32, LINEAR_F16)  # kinds that baton_linear doesn't know
CODES = {torch.float32: native.F32, torch.bfloat16: native.BF16}


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Returns x · weightᵀ + bias, (rows, n) in x's dtype; float32 or bfloat16 rows if ``weight`` is packed.

    Packed float32 and float16 weights are unpacked for the reference: native code multiplies them by ``dense``.
    """
    if isinstance(weight, PackedWeight) and weight.kind in FLOATS:
        return reference.linear(x, unpack_f32(weight).to(x.dtype), bias)
    if not isinstance(weight, PackedWeight) or weight.kind == E4M3 or native.library() is None:
        return reference.linear(x, weight, bias)
    return run(_function(), x, weight, bias)


def run(function: NativeFunction, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Calls ``function``, a library's baton_linear, once; returns (rows, n) in x's dtype.

    Raises ValueError for packed float32 and float16 weights, whose bytes it would misread.
    """
    assert x.shape[1] == weight.k
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((x.shape[0], weight.n), dtype=x.dtype)
    prepared(function, x, weight, out, None if bias is None else bias.float())()
    return out


def prepared(
    function: NativeFunction, x: Tensor, weight: PackedWeight, out: Tensor, bias: Tensor | None = None
) -> Callable[[], None]:
    """Returns a function that computes ``run`` into ``out`` with prepared arguments, for timing the call alone.

    Raises ValueError as ``run`` does.
    """
    require(weight.kind not in FLOATS, f"linear: kind {weight.kind} is a float weight, which dense multiplies")
    at_bias, code = None if bias is None else bias.data_ptr(), CODES[x.dtype]
    arguments = (
        *(weight.address, x.data_ptr(), code, x.stride(0), x.shape[0]),
        *(at_bias, out.data_ptr(), code, out.stride(0)),
    )

    def call(alive: tuple[object, ...] = (weight, x, out, bias)) -> None:
        function(*arguments)

    return call


@cache
def _function() -> NativeFunction:
    return native.function("linear", *ARGUMENTS)
