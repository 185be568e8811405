"""Picks each op's implementation: the wanted backend's file if the op's folder has one, else its reference.

Knows nothing of what the ops compute. An op is a folder in this package; an implementation is a module in it with a
function of the folder's name. ``torch_op.py`` is a third kind: the op in the namespace ``torch.ops.baton``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REFERENCE = "reference"
TORCH_OP = "torch_op"


def ops() -> tuple[str, ...]:
    """Returns the names of all ops, sorted."""
    return tuple(sorted(path.parent.name for path in Path(__file__).parent.glob(f"*/{REFERENCE}.py")))


def implementation(op: str, backend: str = REFERENCE) -> Callable[..., Any]:
    """Returns the function of ``op`` for ``backend``, or its reference if the backend has none."""
    package = f"{__package__}.{op}"
    found = backend if find_spec(f"{package}.{backend}") else REFERENCE
    return getattr(import_module(f"{package}.{found}"), op)


def kernels(backend: str = REFERENCE) -> SimpleNamespace:
    """Returns a namespace with the functions of all ops for ``backend`` as attributes."""
    return SimpleNamespace(**{op: implementation(op, backend) for op in ops()})


@cache
def torch_ops() -> Any:
    """Returns ``torch.ops.baton`` with every op that has a torch_op.py, defined on the first call."""
    for path in sorted(Path(__file__).parent.glob(f"*/{TORCH_OP}.py")):
        import_module(f"{__package__}.{path.parent.name}.{TORCH_OP}")
    return import_module("torch").ops.baton
