"""Computes which heads of recurrent layers a tensor parallel rank has: of gated delta nets whole key heads with
their value heads, of Mamba-2 heads and the groups that they read.

Knows nothing of tensors or of other layers. The ops' inputs, convolutions and states are the own heads' alone; a
single group of Mamba-2 is convolved on every rank, because all heads read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.rank_program import Rank, Rows

RecurrentOp = p.GatedDelta | p.StateSpace


class OwnHeads(NamedTuple):
    """Holds a rank's part of a recurrent layer."""

    op: RecurrentOp
    inputs: dict[str, Rows]  # rows of the matrices that compute its inputs, by register
    rows: dict[str, Rows]  # rows of its own weights
    columns: tuple[int, int]  # range of the output's columns
    total: int  # columns of the output on all ranks
    norm: p.NormPart | None = None  # of the whole output, if the rank can't norm its own part


def state_obstacles(program: Program, count: int) -> Iterator[str]:
    """Yields why the recurrent layers of ``program`` can't be divided among ``count`` ranks; nothing if they
    can.
    """
    for op in program.ops:
        if isinstance(op, p.GatedDelta) and op.key_heads < count:
            yield f"a recurrent layer has {op.key_heads} key heads"
        elif isinstance(op, p.StateSpace) and (op.heads < count or (op.groups > 1 and op.groups % count)):
            yield f"a recurrent layer has {op.heads} heads in {op.groups} groups, which don't come out even"


def own_heads(op: RecurrentOp, rank: Rank) -> OwnHeads:
    """Returns the part of ``op`` that ``rank`` has."""
    return _of_delta(op, rank) if isinstance(op, p.GatedDelta) else _of_state_space(op, rank)


def _of_delta(op: p.GatedDelta, rank: Rank) -> OwnHeads:
    k0, k1 = (op.key_heads * at // rank.count for at in (rank.index, rank.index + 1))
    each = op.value_heads // op.key_heads
    keys, values = op.key_heads * op.key_dim, op.value_heads * op.value_dim
    v0, v1 = k0 * each, k1 * each
    of_q, of_v = (k0 * op.key_dim, k1 * op.key_dim), (v0 * op.value_dim, v1 * op.value_dim)
    channels = of_q, _moved(of_q, keys), _moved(of_v, 2 * keys)
    wide = 2 * op.key_dim + 2 * each * op.value_dim
    mixed: Rows = (*channels, _moved(of_v, 2 * keys + values))
    gates: Rows = ((v0, v1), (op.value_heads + v0, op.value_heads + v1))
    if op.grouped:
        mixed, gates = ((k0 * wide, k1 * wide),), ((k0 * 2 * each, k1 * 2 * each),)
    own = msgspec.structs.replace(
        op, key_heads=k1 - k0, value_heads=v1 - v0, first_key_head=k0, all_key_heads=op.key_heads
    )
    rows = {op.conv: channels, op.a_log: ((v0, v1),), op.dt_bias: ((v0, v1),)}
    return OwnHeads(own, {op.mixed: mixed, op.gates: gates}, rows, of_v, values)


def _of_state_space(op: p.StateSpace, rank: Rank) -> OwnHeads:
    whole = op.groups > 1  # groups
    unit = op.heads // op.groups if whole else 1
    h0, h1 = (op.heads // unit * at // rank.count * unit for at in (rank.index, rank.index + 1))
    g0, g1 = (h0 // unit, h1 // unit) if whole else (0, 1)
    inner, grouped = op.heads * op.head_dim, op.groups * op.size
    of_x, of_b = (h0 * op.head_dim, h1 * op.head_dim), (inner + g0 * op.size, inner + g1 * op.size)
    channels = of_x, of_b, _moved(of_b, grouped)
    of_dt = 2 * inner + 2 * grouped
    mixed = (of_x, *(_moved(part, inner) for part in channels), (of_dt + h0, of_dt + h1))
    own = msgspec.structs.replace(
        op, heads=h1 - h0, groups=g1 - g0, norm=op.norm if whole else "",
        first_head=h0, first_group=g0, all_heads=op.heads, all_groups=op.groups,
    )  # fmt: skip
    rows: dict[str, Rows] = {op.conv: channels} | dict.fromkeys((op.a_log, op.skip, op.dt_bias), ((h0, h1),))
    if op.conv_bias is not None:
        rows[op.conv_bias] = channels
    if whole:
        rows[op.norm] = (of_x,)
    norm = None if whole else p.NormPart(op.out, 0, inner, op.norm, op.eps)
    return OwnHeads(own, {op.mixed: mixed}, rows, of_x, inner, norm)


def _moved(part: tuple[int, int], by: int) -> tuple[int, int]:
    return part[0] + by, part[1] + by
