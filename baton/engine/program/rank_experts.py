"""Computes which experts a rank has of each mixture-of-experts layer, and the ops that run them.

Knows nothing of tensors or of other layers. A rank has whole experts, and mixes the outputs of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.rank_program import Rank, Rows

MOST_EXPERT_LAYERS = 256  # layers of experts whose rows are counted, as in kernels/step/ranks/ranks.h
EXPERTS = "experts"  # the register of all experts' outputs


class DealtExperts(NamedTuple):
    """Holds a rank's part of a mixture-of-experts layer."""

    rows: dict[str, Rows]  # the rank's rows of the experts' weights
    columns: int  # of the register ``EXPERTS``
    ops: tuple[p.Op, ...]


def few_experts(program: Program, count: int) -> Iterator[str]:
    """Yields the reason why the experts of ``program`` can't be divided among ``count`` ranks; nothing if
    they can.
    """
    if len(program.experts) > MOST_EXPERT_LAYERS:
        yield f"it has {len(program.experts)} layers of experts, and {MOST_EXPERT_LAYERS} at most can be divided"
    if any(op.experts < count for op in program.experts):
        yield f"a layer has {program.experts[0].experts} experts only"


def rows_of(program: Program, name: str) -> int:
    """Returns the rows of a weight, which may be stacked from several tensors."""
    weight = next(weight for weight in program.weights if weight.name == name)
    return sum(shape[0] for shape in weight.shapes)


def deal_experts(program: Program, rank: Rank, op: p.Moe, x: str = "", logits: str = "") -> DealtExperts:
    """Returns the part of mixture-of-experts layer ``op`` that ``rank`` has.

    Its experts read rows from register ``x`` and router logits from ``logits``; empty means the layer's own. Each
    rank has some whole experts and mixes the outputs of all.
    """
    first, end = rank.experts(op.experts)
    spare = ((first, first + 1),) * rank.spare  # until a copy is wanted there
    biases = () if op.gate is None else (op.gate.gate_up_bias, op.gate.down_bias)
    rows = dict[str, Rows]()
    for name in (op.gate_up, op.down, *biases):
        each = rows_of(program, name) // op.experts
        rows[name] = tuple((begin * each, last * each) for begin, last in ((first, end), *spare))
    own, at, numbers = f"{EXPERTS}@", (x or op.x, logits or op.logits), (op.experts, first, end - first, op.chosen)
    place = program.experts.index(op), rank.index, rank.count, rank.spare
    run = p.OwnExperts(*at, op.gate_up, op.down, *numbers, op.renormalise, own, op.gate, *place)
    mix = p.MixExperts(EXPERTS, op.logits, op.gate_up, op.out)
    columns = op.chosen * (rows_of(program, op.down) // op.experts)
    return DealtExperts(rows, columns, (run, p.Meet(own, EXPERTS), mix))
