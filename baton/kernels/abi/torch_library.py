"""Helpers by which each op's torch_op.py defines it in the namespace ``torch.ops.baton``.

Knows nothing of what the ops compute. An op has one implementation for all devices, which calls native code for a
CPU's float32 tensors if there is any and the reference otherwise, and a fake one that gives only shapes and dtypes,
for torch's tracing. Ops are for inference only: they have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from baton.kernels.abi import native

NAMESPACE = "baton"
_library = torch.library.Library(NAMESPACE, "DEF")

Function = TypeVar("Function", bound=Callable[..., object])


def define(schema: str, fake: Callable[..., object]) -> Callable[[Function], Function]:
    """Returns a decorator that registers a function as ``torch.ops.baton.<name in schema>``, with ``fake`` for
    tracing.
    """
    name = schema[: schema.index("(")]

    def defined(function: Function) -> Function:
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        return function

    return defined


@cache
def symbol(name: str, *arguments: native.CType) -> native.NativeFunction | None:
    """Returns the library's function ``baton_<name>`` with its argument types declared; None if there is no
    library.
    """
    return None if native.library() is None else native.function(name, *arguments)


def runs_natively(*tensors: Tensor | None) -> bool:
    """Returns whether native code accepts ``tensors``: each is None, or float32 on a CPU."""
    return all(t is None or (t.dtype == torch.float32 and t.device.type == "cpu") for t in tensors)


def dense(x: Tensor) -> Tensor:
    """Returns ``x``, copied if the elements of its last dimension aren't contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def require(holds: bool, text: str) -> None:
    """Raises ValueError with ``text`` unless ``holds``."""
    if not holds:
        raise ValueError(text)


def address(x: Tensor | None) -> int | None:
    """Returns the address of the first element of ``x``; None for None."""
    return None if x is None else x.data_ptr()
