"""A stand-in of CUDA graphs that really computes: it records the ops of a run and repeats them on the same memory.

Like a real capture it freezes every number that Python read, and refuses an op that has to wait for its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[], None]
# Ops whose result or its shape the host needs.
WAITING = {"aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal", "aten._unique2"}


class Recording(TorchDispatchMode):
    """Records ops that write memory; those that only view some aren't repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name in WAITING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **(kwargs or {}))
        held = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        is_view = all(one.untyped_storage().data_ptr() in held for one in _tensors(out))  # a cast may be none
        if func._schema.is_mutable or not is_view:
            self.ops.append((func, args, kwargs or {}, out))
        return out


def capture(run: Run) -> Run:
    """Returns what repeats the ops of ``run``."""
    run()
    with Recording() as recorded:
        run()

    def replay() -> None:
        for func, args, kwargs, out in recorded.ops:
            again = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue
            for into, value in zip(_tensors(out), _tensors(again), strict=True):
                if into.data_ptr() != value.data_ptr():
                    into.copy_(value)

    return replay


def _tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
