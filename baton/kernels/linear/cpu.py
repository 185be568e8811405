"""linear on native code: packed weights run there, plain tensors stay with torch. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, P
from baton.kernels.linear import reference
from baton.kernels.linear.packed import PackedWeight

ARGUMENTS = (P, P, I32, I64, I64, P, P, I32, I64)
CODES = {torch.float32: native.F32, torch.bfloat16: native.BF16}


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """As the reference. A packed weight takes float32 or bfloat16 rows; ``bias`` is float32 then."""
    if not isinstance(weight, PackedWeight) or native.library() is None:
        return reference.linear(x, weight, bias)
    return run(_function(), x, weight, bias)


def run(function: Callable[..., Any], x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """One call of baton_linear, from whichever library."""
    assert x.shape[1] == weight.k
    x = x if x.stride(1) == 1 else x.contiguous()
    bias = None if bias is None else bias.float()
    out = torch.empty((x.shape[0], weight.n), dtype=x.dtype)
    at_bias = None if bias is None else bias.data_ptr()
    code = CODES[x.dtype]
    function(
        weight.address, x.data_ptr(), code, x.stride(0), x.shape[0], at_bias, out.data_ptr(), code, out.stride(0)
    )
    return out


@cache
def _function() -> Callable[..., Any]:
    return native.function("linear", *ARGUMENTS)
