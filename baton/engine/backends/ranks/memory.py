"""Lays out the memory that a worker's ranks share: synchronization, plan, rotary angles, registers and logits.

Knows nothing of processes or weights. It is one memfd whose memory the kernel allocates on first use, so that
its limits are far above what steps use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.backends.native.step_runner import FIRST_ANGLES
from baton.engine.backends.ranks.link_plan import LinkPlan
from baton.engine.backends.ranks.notes import PagesNote
from baton.engine.backends.ranks.program import CarriedRegisters, LastOpsStruct, NativeRankProgram
from baton.engine.program.program import Program
from baton.kernels.abi import native
from baton.kernels.abi.native import I32, I64, NativeFunction, P
from baton.kernels.collective.native import Group, group_at, group_bytes
from baton.kernels.lora.structs import LoraStep
from baton.kernels.step.structs import Model
from baton.kv.layout.extents import Part

MOST_ROWS = 1 << 15  # most rows of a step, and most of these that need logits
MOST_STATES = 512  # most sequences of a step of a model with recurrent state
PLAN_BYTES = 256 << 20  # bytes of tokens and block tables
SLOT_BYTES = 64 << 10  # bytes of copies between ranks; a step copies nothing
PAGE = 4096  # bytes of a page of the kernel's, at which each part begins
HEAR = -2  # ranks.h: listen on the socket


class SharedStatesStruct(ctypes.Structure):
    """Mirrors the C struct SharedStates of step/ranks/ranks.h."""

    _fields_ = (
        ("rooms", P * 2),
        *((name, I64) for name in ("stride", "bytes")),
        *(("own", P), ("count", I64), ("placed", P)),
    )


class PageExtentStruct(ctypes.Structure):
    """Mirrors the C struct PageExtent of step/ranks/ranks.h."""

    _fields_ = tuple((name, I64) for name in ("at", "bytes", "stride", "count"))


class RanksStruct(ctypes.Structure):
    """Mirrors the C struct Ranks of step/ranks/ranks.h."""

    _fields_ = (
        ("group", Group),
        *((name, P) for name in ("plan", "angles", "pages", "registers", "logits")),
        *((name, I64) for name in ("plan_bytes", "register_floats", "logit_floats")),
        ("is_shared", P),
        *((name, I64) for name in ("vocab", "first_token")),
        *((name, I32) for name in ("first_head", "heads", "page_heads", "deal")),
        ("carried_floats", I64),
        *((name, I32) for name in ("op_count", "taken", "given", "seen")),
        ("in", CarriedRegisters),
        ("out", CarriedRegisters),
        *((name, P) for name in ("adapters", "lora")),
        ("everyones", LoraStep),
        *((name, I64) for name in ("shared_floats", "first_shared")),
        *((name, I32) for name in ("columns", "met")),
        ("own_tokens", I64),
        ("expert_layers", I64),
        ("op_tables", P),
        ("page_tables", I64),
        ("states", SharedStatesStruct),
        ("crosses", I64),
        ("last", LastOpsStruct),
    )


class DealStruct(ctypes.Structure):
    """Mirrors the C struct Deal of step/ranks/ranks.h."""

    _fields_ = (
        *((name, P) for name in ("owners", "adapters")),
        *((name, I32) for name in ("parts", "keeps", "swapped", "spares")),
        ("brought", P),
        *((name, I64) for name in ("brought_count", "positions")),
    )


class SharedSizes(msgspec.Struct, frozen=True):
    """The bytes of each part of the shared memory, in order."""

    group: int  # synchronization of the ranks
    plan: int
    rope_angles: int  # rotary angles
    registers: int
    logits: int
    states: int  # recurrent, of a step's items: before it, then behind it

    @property
    def total(self) -> int:
        """Returns the bytes of the whole memory."""
        return self.group + self.plan + self.rope_angles + self.registers + self.logits + self.states


def sizes_for(program: Program, own: NativeRankProgram) -> SharedSizes:
    """Returns the sizes of the shared memory of ``program``, which are the same for every rank's share ``own``."""
    parts = (
        group_bytes(own.own.rank.count, SLOT_BYTES),
        PLAN_BYTES,
        4 * max(program.max_position, FIRST_ANGLES) * own.rope.width,
        4 * MOST_ROWS * (own.own.shared_floats + own.own.carried),
        4 * MOST_ROWS * program.vocab_size,
        2 * MOST_STATES * own.state_stride,
    )
    return SharedSizes(*(-(-part // PAGE) * PAGE for part in parts))


class SharedMemory:
    """Maps the shared memory ``fd``, which it owns; ``meeting``, ``plan``, … are the addresses of its parts."""

    def __init__(self, fd: int, sizes: SharedSizes) -> None:
        self.fd, self.sizes = fd, sizes
        self._map = mmap.mmap(fd, sizes.total, mmap.MAP_SHARED)
        self._byte = ctypes.c_char.from_buffer(self._map)
        self.meeting = ctypes.addressof(self._byte)
        self.plan = self.meeting + sizes.group
        self.rope_angles = self.plan + sizes.plan
        self.registers = self.rope_angles + sizes.rope_angles
        self.logits = self.registers + sizes.registers
        self.states = self.logits + sizes.logits

    @classmethod
    def create(cls, sizes: SharedSizes) -> SharedMemory:
        """Returns new zeroed shared memory."""
        fd = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, sizes.total)
        return cls(fd, sizes)

    def struct(self, native: NativeRankProgram, bound_s: float) -> RanksStruct:
        """Returns the C struct of the rank whose program is ``native``, without its pages; ``bound_s`` limits the
        seconds of waiting for another rank.
        """
        sizes, own = self.sizes, native.own
        native.place_states(self.states, self.states + MOST_STATES * native.state_stride)
        first, end = own.own_kv
        return RanksStruct(
            group_at(self.meeting, own.rank.index, own.rank.count, SLOT_BYTES, bound_s),
            *(self.plan, self.rope_angles, None, self.registers, self.logits),
            *(sizes.plan, sizes.registers // 4, sizes.logits // 4),
            native.is_shared,
            *(own.program.vocab_size, own.vocab[0]),
            *(first, end - first, own.program.kv_heads, own.deal),
            own.carried,
            *(len(native.ops), 0, 0, 0),
            *native.carried,
            None,
            ctypes.addressof(native.lora),
            LoraStep(None, 0),
            *(own.shared_floats, own.first_shared, own.columns, 0),
            own.vocab[1] - own.vocab[0],
            own.expert_layers,
            *(native.op_tables, native.table_count),
            self._states_of(native),
            own.crosses,
            native.last_ops(),
        )

    def _states_of(self, native: NativeRankProgram) -> SharedStatesStruct:
        """Returns where the recurrent states of a step's items lie; zeros if the model has none."""
        if not native.state_bytes:
            return SharedStatesStruct()
        stride, own = native.state_stride, native.own_states
        after = self.states + (MOST_STATES * stride if native.divides_states else 0)
        assert native.spans is not None
        placed = ctypes.addressof(native.spans.states)
        rooms = (P * 2)(self.states, after)
        return SharedStatesStruct(rooms, stride, native.state_bytes, own.ctypes.data, len(own), placed)


def lead_step() -> NativeFunction:
    """Returns the native function baton_rank_lead(model, step, table, table's entries, deal, ranks), which runs the
    lead's step.
    """
    return native.function("rank_lead", P, P, P, I64, P, P, result=I32)


def follow(model: Model, ranks: RanksStruct) -> int:
    """Runs a follower's part of all steps; returns 0 when told to leave, HEAR when told to listen on its socket and
    call this again.

    Otherwise it returns the collective's code of a lost rank.
    """
    call = native.function("rank_follow", P, P, result=I32)
    return call(ctypes.addressof(model), ctypes.addressof(ranks)) or 0


def call(ranks: RanksStruct) -> None:
    """Tells the followers to listen on their sockets; they take the next order after they have answered."""
    native.function("rank_call", P)(ctypes.addressof(ranks))


def show_angles(ranks: RanksStruct, size: int) -> None:
    """Copies the first ``size`` bytes of the lead's rotary angles to other hosts, before the next step."""
    native.function("rank_show_angles", P, I64)(ctypes.addressof(ranks), size)


def show_states(ranks: RanksStruct, items: Sequence[int], swapped: bool) -> None:
    """Copies the recurrent states of the next step's items with the numbers ``items`` to other hosts; ``swapped``:
    that step finds them in the second room.
    """
    numbers = (ctypes.c_int32 * len(items))(*items)
    call = native.function("rank_show_states", P, P, I64, I32)
    call(ctypes.addressof(ranks), ctypes.addressof(numbers), len(items), swapped)


def show_pages(ranks: RanksStruct, host: int, pages: Sequence[int], page_bytes: int, part: Part) -> None:
    """Copies ``part`` of each of the lead's ``pages``, of ``page_bytes`` each, to ``host`` before the next step."""
    numbers = (ctypes.c_int32 * len(pages))(*pages)
    extents = (PageExtentStruct * len(part))(*(PageExtentStruct(*msgspec.structs.astuple(each)) for each in part))
    call = native.function("rank_show_pages", P, I32, P, I64, I64, P, I64)
    at = ctypes.addressof(numbers), len(pages), page_bytes, ctypes.addressof(extents), len(part)
    call(ctypes.addressof(ranks), host, *at)


def bring_pages(ranks: RanksStruct, note: PagesNote, plan: LinkPlan | None) -> int:
    """Copies what the host of a rank has of pages to the lead's, if it is the host's first rank, and meets the
    others: the bytes are there when all have met. Returns 0, or the collective's code of a lost rank.
    """
    if plan is not None:
        rank = ranks.group.rank
        host = plan.places[rank]
        if host and plan.places.index(host) == rank and note.parts[host]:
            show_pages(ranks, 0, note.pages, note.page_bytes, note.parts[host])
    return meet(ranks)


def meet(ranks: RanksStruct) -> int:
    """Meets all other ranks; returns 0, or the collective's code of a lost rank."""
    return native.function("collective_meet", P, result=I32)(ctypes.addressof(ranks.group)) or 0


class CountedRows(NamedTuple):
    """Holds the rows that went to each expert of each layer, (layers, experts), and that each rank computed."""

    by_expert: NDArray[np.int64]
    by_rank: NDArray[np.int64]


def expert_rows(ranks: RanksStruct, experts: int) -> CountedRows:
    """Returns the rows that the ``experts`` experts of each layer have processed so far."""
    layers, count = ranks.expert_layers, ranks.group.count
    found = CountedRows(np.zeros((layers, experts), np.int64), np.zeros(count, np.int64))
    call = native.function("rank_expert_rows", P, P, I32, P)
    call(ctypes.addressof(ranks), found.by_expert.ctypes.data, experts, found.by_rank.ctypes.data)
    return found


def dismiss(ranks: RanksStruct) -> None:
    """Tells the followers to end."""
    native.function("rank_dismiss", P)(ctypes.addressof(ranks))
