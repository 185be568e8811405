"""Finds ops that a CPU's step may compute within a product: the norm before it, and the gate behind it.

Knows nothing of kernels. What lies between such ops isn't written, so nobody else may read its register.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from baton.engine.program.ops import Adapt, Linear, Op, RmsNorm, SwiGlu
from baton.kernels.step import structs


def mark_gates(ops: Sequence[Op], compiled: Sequence[structs.Op], registers: Mapping[str, int]) -> None:
    """Sets ``window`` in the compiled forms of ``ops``: 1 at a linear whose result its gate alone reads, and at a
    gate whose result the linear behind it alone reads.
    """
    for at, (op, after) in enumerate(pairwise(ops)):
        if not isinstance(op, Linear) or not isinstance(after, SwiGlu) or after.gate_up != op.out:
            continue
        compiled[at].window = int(_is_over(op.out, ops, at + 2, registers))
        then = ops[at + 2] if at + 2 < len(ops) else None
        if isinstance(then, Linear) and then.x == after.out:
            compiled[at + 1].window = int(_is_over(after.out, ops, at + 3, registers))


def mark_norms(ops: Sequence[Op], compiled: Sequence[structs.Op], registers: Mapping[str, int]) -> None:
    """Sets ``window`` to 1 in the compiled forms of norms in ``ops`` that the linear behind them alone reads."""
    for at, (op, after) in enumerate(pairwise(ops)):
        if not isinstance(op, RmsNorm) or not isinstance(after, Linear) or compiled[at].kind != structs.RMS_NORM:
            continue
        compiled[at].window = int(after.x == op.out != op.x and _is_over(op.out, ops, at + 2, registers))


def names_of(op: Op, fields: Iterable[str], registers: Mapping[str, int]) -> set[str]:
    """Returns the registers that ``fields`` of ``op`` name."""
    values = [getattr(op, field, None) for field in fields]
    named = [name for value in values for name in (value if isinstance(value, tuple) else (value,))]
    return {name for name in named if isinstance(name, str) and name in registers}


def read_by(op: Op, registers: Mapping[str, int]) -> set[str]:
    """Returns the registers that ``op`` may read."""
    return names_of(op, (name for name in op.__struct_fields__ if name != "out"), registers)


def _is_over(name: str, ops: Sequence[Op], begin: int, registers: Mapping[str, int]) -> bool:
    """Returns whether no op from ``begin`` on reads what register ``name`` holds before them."""
    for op in ops[begin:]:
        writes = name in names_of(op, ("out",), registers)
        if name in read_by(op, registers) or (writes and isinstance(op, Adapt)):
            return False
        if writes:
            return True
    return True
