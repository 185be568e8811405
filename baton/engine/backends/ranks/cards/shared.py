"""Lays out the memory that a worker's ranks on cards share, and calls what passes a plan through it.

Knows nothing of cards or weights. It is as the memory of ranks on a CPU, without registers: those are on the cards.
"""

from __future__ import annotations

import ctypes

from baton.engine.backends.native.step_runner import FIRST_ANGLES
from baton.engine.backends.ranks.memory import (
    MOST_ROWS,
    PAGE,
    PLAN_BYTES,
    SLOT_BYTES,
    RanksStruct,
    SharedMemory,
    SharedSizes,
)
from baton.engine.program.rank_program import RankProgram
from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, NativeFunction, P
from baton.kernels.collective.native import group_at, group_bytes
from baton.kernels.step.structs import Step

HEAR, LEFT = -2, -3  # ranks.h


class TakenPlan(ctypes.Structure):
    """Mirrors the C struct TakenPlan of step/ranks/ranks.h."""

    _fields_ = (("step", Step), ("brought", P), *((name, I64) for name in ("brought_count", "positions")))


def card_sizes(own: RankProgram, angles: int) -> SharedSizes:
    """Returns the sizes of the shared memory of a program of which ``own`` is any rank's share; a position has
    ``angles`` floats of rotary angles.
    """
    group, program = group_bytes(own.rank.count, SLOT_BYTES), own.program
    rope, logits = max(program.max_position, FIRST_ANGLES) * angles, MOST_ROWS * program.vocab_size
    parts = (group, PLAN_BYTES, 4 * rope, 0, 4 * logits, 0)
    return SharedSizes(*(-(-part // PAGE) * PAGE for part in parts))


def card_ranks(memory: SharedMemory, own: RankProgram, bound_s: float) -> RanksStruct:
    """Returns the C struct of the rank that has the share ``own``; ``bound_s`` limits the seconds of waiting for
    another rank.
    """
    found = RanksStruct(group_at(memory.meeting, own.rank.index, own.rank.count, SLOT_BYTES, bound_s))
    found.plan, found.angles, found.logits = memory.plan, memory.rope_angles, memory.logits
    found.plan_bytes, found.logit_floats = memory.sizes.plan, memory.sizes.logits // 4
    found.vocab, found.columns = own.program.vocab_size, own.rank.count
    return found


def give() -> NativeFunction:
    """Returns the native function baton_rank_give(step, table, table's entries, deal, ranks)."""
    return native.function("rank_give", P, P, I64, P, P, result=I32)


def take(ranks: RanksStruct, plan: TakenPlan) -> int:
    """Waits for the lead's next plan; returns 0 once it is in ``plan``, HEAR, LEFT, or the code of a lost rank."""
    return native.function("rank_take", P, P, result=I32)(ctypes.addressof(ranks), ctypes.addressof(plan)) or 0


def done(ranks: RanksStruct) -> int:
    """Returns when every rank has called it for this step: 0, or the code of a lost rank."""
    return native.function("rank_done", P, result=I32)(ctypes.addressof(ranks)) or 0


def choose(ranks: RanksStruct, step: Step) -> None:
    """Chooses the step's tokens from the logits of all ranks."""
    native.function("rank_choose", P, P)(ctypes.addressof(ranks), ctypes.addressof(step))


def declare(ranks: RanksStruct, code: int) -> int:
    """Tells all ranks who is lost, by the collective's code; returns that of the first one that was."""
    return native.function("rank_declare", P, I32, result=I32)(ctypes.addressof(ranks), code) or code
