"""Runs steps as the lead of several ranks, by one native call in which the ranks synchronize.

Knows nothing of schedulers. The lead computes its own part, passes every plan to the others by shared memory and
chooses the tokens; a step's results are bitwise those of a single rank.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from baton.engine.abilities import Mirror
from baton.engine.adapters.base import AdapterBase
from baton.engine.backends.native.batch import Array, NativeBatch
from baton.engine.backends.native.states import StateRoom, StepStates
from baton.engine.backends.native.step_runner import StepRunner
from baton.engine.backends.ranks.adapters import OwnAdapters, RankAdapters
from baton.engine.backends.ranks.balancing import LOOK_ROWS, ExpertBalancer
from baton.engine.backends.ranks.dealing import Piece, among_ranks, in_one_part, in_parts
from baton.engine.backends.ranks.followers import Followers
from baton.engine.backends.ranks.host_pages import HostPages
from baton.engine.backends.ranks.hosts.lead import LeadHosts
from baton.engine.backends.ranks.hosts.links import HostMemory
from baton.engine.backends.ranks.load import LoadedRank
from baton.engine.backends.ranks.memory import (
    MOST_ROWS,
    MOST_STATES,
    CountedRows,
    DealStruct,
    SharedMemory,
    call,
    dismiss,
    expert_rows,
    lead_step,
    meet,
    show_angles,
    show_pages,
    show_states,
    sizes_for,
)
from baton.engine.backends.ranks.notes import PagesNote, written
from baton.engine.backends.ranks.shown_states import ShownStates
from baton.engine.plan import ModelSpec, StepPlan
from baton.engine.program.ops import LmHead
from baton.engine.program.rank_program import BY_COLUMNS, BY_ROWS, dealt_experts
from baton.kernels.collective.native import RankIsLost
from baton.kernels.step.structs import Step
from baton.kv.layout.extents import Part
from baton.kv.layout.tables import layers_of_page
from baton.protos.channel import HostSender
from baton.protos.errors import BatonError, RankLost, Unavailable
from baton.protos.measurements import EngineWork, ExpertCopies, ExpertRows
from baton.protos.nouns import KvLayout

TOO_LARGE = -1  # ranks.h


class RankRunner(StepRunner):
    """Implements ``Runner`` and ``Ranks`` on several ranks, as their lead: ``followers`` on this host, and those of
    ``hosts`` on others.

    ``bound_s`` limits the seconds of waiting for another rank. After each ``look_rows`` rows of steps busy experts
    get copies on other ranks, if there are places for them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        loaded: LoadedRank,
        followers: Followers,
        bound_s: float,
        clock: Callable[[], float] = time.perf_counter,
        work: EngineWork | None = None,
        adapters: AdapterBase | None = None,
        most_adapters: int = 0,
        hosts: LeadHosts | None = None,
        look_rows: int = LOOK_ROWS,
    ) -> None:
        super().__init__(spec, loaded.native, clock, work)
        self._own, self._followers, self._hosts = loaded.native, followers, hosts
        self._undivided = loaded.program
        self._held: HostPages | None = None  # which pages other hosts have as they must be
        self._shown_states = ShownStates(swaps=loaded.native.divides_states)
        self._layers = layers_of_page(spec.layout) if spec.layout.windows else loaded.program.layers
        self._dealt_experts = dealt_experts(loaded.program, loaded.native.own)
        self._own_experts = loaded.experts
        self._memory = SharedMemory.create(sizes_for(loaded.program, loaded.native))
        followers.share(self._memory.fd, self._memory.sizes.total)
        self._ranks = self._memory.struct(loaded.native, bound_s)
        self._bound_s = bound_s
        self._balancer: ExpertBalancer | None = None
        if loaded.native.own.rank.spare:
            ranks, spare = len(self._dealt_experts), loaded.native.own.rank.spare
            self._balancer = ExpertBalancer(lambda: self._counted().by_expert, ranks, spare, look_rows)
        own = OwnAdapters(loaded.native.own, most_adapters)
        self._ranks.adapters = own.table
        self.adapters = None
        if adapters is not None:
            self.adapters = RankAdapters(
                adapters, own, most_adapters, self._tell, shares=hosts is None, copies=loaded.copies_parts
            )
        self._run = lead_step()
        self._arena = torch.empty(0)
        self._shown = 0  # positions whose rotary angles are in shared memory
        self._buffer: memoryview | None = None
        self._paged = torch.empty((0, 0), dtype=torch.uint8)  # (pages, bytes of a page), the buffer
        self._kept: list[Array] = []  # of the step that runs

    @property
    def ranks(self) -> RankRunner:
        """Returns this runner, which implements ``Ranks`` itself."""
        return self

    def expert_rows(self) -> ExpertRows | None:
        """Returns the rows that experts have computed so far; None unless experts are divided among ranks."""
        if not self._dealt_experts:
            return None
        rows = self._counted()
        by_place = rows.by_rank.reshape(-1, len(self._dealt_experts)).sum(0)  # a rank's place in its stage
        copies = ExpertCopies() if self._balancer is None else self._balancer.copies
        return ExpertRows(tuple(by_place.tolist()), tuple(rows.by_expert.sum(0).tolist()), copies)

    def _counted(self) -> CountedRows:
        return expert_rows(self._ranks, self._dealt_experts[-1][1])

    def _place_experts(self, rows: int) -> None:
        """Gives ranks the copies of busy experts that they should have before a step of ``rows`` rows."""
        if self._balancer is None or (note := self._balancer.due(rows)) is None:
            return
        with written(note) as (fd, size):
            self._tell(fd, size)
        try:
            self._own_experts.place(note)
        except Exception as error:  # the others have placed it, so nobody would compute some rows
            raise RankLost(f"rank 0 couldn't place copies of experts: {error}", rank=0) from error
        self._balancer.placed(note)

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the KV pages of the lead; ``open_pages`` passes them to the other ranks."""
        self._buffer, self._pages = buffer, pages
        self._paged = torch.frombuffer(buffer, dtype=torch.uint8).view(pages, -1)
        self._ranks.pages = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if self._hosts is not None:
            parts, size = self._hosts.parts_read(self._undivided, self.spec.layout), self.spec.layout.page_bytes
            self._held = HostPages(parts, pages, size, self._own.table_count, self._show_part, self._bring)

    def open_pages(self, fd: int, size: int, layout: KvLayout | None = None) -> None:
        """Passes the pages of ``bind``, memory file ``fd`` of ``size`` bytes, to the other ranks of this host; the
        other hosts make as many, and with ``layout`` get KV senders. Raises StartupError.
        """
        self._followers.share(fd, size)
        if self._hosts is not None:
            kept = self._memory, self._buffer
            sizes = self._memory.meeting, self._memory.sizes.total, self._ranks.pages, size
            links = self._hosts.connect(HostMemory(*sizes, kept), self._followers, self._undivided, layout)
            self._ranks.group.links = links.address

    @property
    def senders(self) -> tuple[HostSender, ...]:
        """Returns the hosts that each send a part of every page; () if the lead's host sends all."""
        return () if self._hosts is None else self._hosts.senders

    @property
    def receivers(self) -> tuple[HostSender, ...]:
        """Returns the hosts that each receive what they read of every page; () if the lead's host receives all."""
        return () if self._hosts is None else self._hosts.receivers

    @property
    def mirror(self) -> Mirror | None:
        """Returns what is to be told of pages that come in parts to each host; None if none do."""
        return self._held if self.receivers else None

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """Calls ``lost`` if another rank's process ends unexpectedly; a step in progress then raises RankLost."""
        self._followers.watch(self._memory.meeting, lost)
        if self._hosts is not None:
            self._hosts.watch(lost)

    def _tell(self, fd: int, size: int) -> None:
        """Passes a note to all other ranks. Raises RankLost, also for want of memory: they wait for it from here
        on.
        """
        call(self._ranks)
        self._followers.tell(fd, size, self._bound_s)
        if self._hosts is not None:
            self._hosts.tell(fd, size, self._bound_s)

    def leave(self) -> None:
        """Ends the processes of the other ranks."""
        self._followers.leave(lambda: dismiss(self._ranks))
        if self._hosts is not None:
            self._ranks.group.links = None
            self._hosts.leave()

    def pids(self) -> list[int]:
        """Returns the process ids of the other ranks."""
        return self._followers.pids()

    def _compute(self, plan: StepPlan, batch: NativeBatch) -> None:
        self._kept = []
        self._place_experts(batch.rows)
        states = self._states(plan)
        self._show_angles(batch.reach)
        missing = [] if self._held is None else self._held.show(plan.items)
        floats = batch.rows * self._own.row_floats
        if len(self._arena) < floats:
            self._arena = torch.empty(floats)
        step = self._step(batch)
        step.angles, step.pages, step.arena = self._memory.rope_angles, self._ranks.pages, self._arena.data_ptr()
        table, deal = (batch.flat.ctypes.data, len(batch.flat)), ctypes.byref(self._dealt(plan, batch, step))
        code = self._run(self._own.address, ctypes.byref(step), *table, deal, ctypes.addressof(self._ranks))
        if code == TOO_LARGE:
            text = f"a step of {batch.rows} tokens is more than {MOST_ROWS} that ranks share memory for"
            raise BatonError(f"{text}; lower worker.prefill_chunk_tokens", "worker.prefill_chunk_tokens")
        if code:
            raise self._lost(code)
        if self._held is not None:
            self._held.ran(plan.items, missing)
        if states is not None:
            states.finish()
            self._shown_states.ran(plan.items)

    def _states(self, plan: StepPlan) -> StepStates | None:
        """Copies the items' recurrent states where all ranks find them; returns None if the model has none."""
        own = self._own
        if not own.state_bytes or own.spans is None:
            return None
        if len(plan.items) > MOST_STATES:
            text = f"a step of {len(plan.items)} sequences is more than {MOST_STATES} whose states ranks share"
            raise BatonError(f"{text}; lower worker.max_batch", "worker.max_batch")
        if self._held is not None:  # of a handoff each host got a part
            self._held.make_whole([page for item in plan.items for page in item.state_from or ()])
        held = (ctypes.c_uint8 * self._memory.sizes.states).from_address(self._memory.states)
        rooms = torch.frombuffer(held, dtype=torch.uint8)[: 2 * MOST_STATES * own.state_stride]
        before, after = rooms.view(2, MOST_STATES, own.state_stride)[:, :, : own.state_bytes]
        room = StateRoom(before, after if own.divides_states else before)
        swapped = self._shown_states.swapped
        found = StepStates(plan, self._paged, own.spans.states, StateRoom(*room[::-1]) if swapped else room)
        if self._hosts is not None:
            show_states(self._ranks, self._shown_states.missing(plan.items), swapped)
        return found

    def _dealt(self, plan: StepPlan, batch: NativeBatch, step: Step) -> DealStruct:
        """Returns how the step's rows are divided, and their adapters; replaces the items of ``step`` by their
        pieces.
        """
        own, found = self._own.own, DealStruct(parts=1, keeps=batch.pools, swapped=self._shown_states.swapped)
        found.spares = _spares(plan, batch)
        numbers = None if self.adapters is None else self.adapters.numbers(plan.items)
        if own.deal != BY_COLUMNS:
            starts, counts = (batch.items[field].tolist() for field in ("start", "queries"))
            by_rows = own.deal == BY_ROWS
            if by_rows:
                pieces = among_ranks(starts, counts, own.rank.count)
            else:  # a state is carried on through all rows of its item, and found by the item's number
                pieces = in_one_part(counts) if self._own.state_bytes else in_parts(counts, own.stages)
            items = self._hold(cut(batch.items, pieces))
            step.items, step.item_count = items.ctypes.data, len(items)
            found.owners, found.parts = self._numbers([piece.owner for piece in pieces]), pieces[-1].owner + 1
            numbers = None if numbers is None else [numbers[piece.item] for piece in pieces]
        found.adapters = None if numbers is None else self._numbers(numbers)
        return found

    def _numbers(self, values: list[int]) -> int:
        """Returns the address of ``values`` as int32, valid while the step runs."""
        found: int = self._hold(np.array(values, np.int32)).ctypes.data
        return found

    def _hold(self, values: Array) -> Array:
        self._kept.append(values)
        return values

    def _head(self) -> LmHead:
        return self._own.own.head

    def _show_angles(self, positions: int) -> None:
        """Copies the table of rotary angles to the shared memory."""
        self._reach(min(positions, self.spec.max_model_len))
        if len(self._rope_angles) > self._shown:
            shown = self._rope_angles[: self._memory.sizes.rope_angles // (4 * self._rope_angles.shape[1])]
            ctypes.memmove(self._memory.rope_angles, shown.data_ptr(), shown.numel() * 4)
            self._shown = len(self._rope_angles)
            show_angles(self._ranks, shown.numel() * 4)

    def _show_part(self, host: int, pages: Sequence[int], part: Part) -> None:
        """Copies ``part`` of each of the lead's ``pages`` to ``host`` before the next step."""
        show_pages(self._ranks, host, pages, self.spec.layout.page_bytes, part)

    def _bring(self, pages: Sequence[int], parts: tuple[Part, ...]) -> None:
        """Has each other host copy its part of ``pages`` to the lead's; returns when it is there. Raises RankLost,
        and Unavailable with nothing changed.
        """
        note = PagesNote(tuple(pages), self.spec.layout.page_bytes, parts)
        with ExitStack() as stack:
            try:
                told = stack.enter_context(written(note))
            except OSError as error:
                text = f"KV that ranks of other hosts have can't be asked for ({error.strerror})"
                raise Unavailable(f"{text}; raise the engine's limit of open files, or its memory") from error
            self._tell(*told)
        if code := meet(self._ranks):
            raise self._lost(code)

    def _lost(self, code: int) -> RankLost:
        lost = RankIsLost(code)
        return RankLost(f"{lost}, of {self._own.own.rank.count} ranks", rank=lost.rank)

    def _rows(self, batch: NativeBatch, name: str, rows: slice) -> Tensor:
        if name in self._own.own.last.registers:
            return self._last(batch, name)[rows].clone()
        if name not in self._own.own.shared:
            return self._own.register(self._arena, batch.rows, name)[rows].clone()
        held = self._shared(batch.rows * self._own.own.shared_floats)
        return self._own.register(held, batch.rows, name)[rows].clone()

    def _last(self, batch: NativeBatch, name: str) -> Tensor:
        """Returns a register of all rows as the last rank left it."""
        own, hidden = self._own.own, self._own.hidden
        before = own.last.widths[: own.last.registers.index(name)]
        at = (own.shared_floats + own.last.first + sum(before)) * batch.rows
        return self._shared(at + batch.rows * hidden)[at:].view(batch.rows, hidden)

    def _shared(self, count: int) -> Tensor:
        held = (ctypes.c_float * count).from_address(self._memory.registers)
        return torch.frombuffer(held, dtype=torch.float32)


def _spares(plan: StepPlan, batch: NativeBatch) -> bool:
    """Returns whether the last ops leave out rows of ``batch`` that nobody reads (``RankProgram.last_ops``)."""
    read = len(np.unique(batch.wanted))
    room = batch.rows + read <= MOST_ROWS  # registers of the rows that are read lie behind those of all
    return room and read < batch.rows and not batch.pools and not any(item.adapter for item in plan.items)


def cut(items: Array, pieces: Sequence[Piece]) -> Array:
    """Returns the items' structs, dtype ITEM, cut into ``pieces``; the block tables are shared with ``items``."""
    of, first, count = (np.array([piece[at] for piece in pieces], np.int64) for at in range(3))
    found = items[of]
    found["first"] += first
    found["start"] += first
    found["queries"] = count
    return found
