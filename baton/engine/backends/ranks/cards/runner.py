"""Runs steps as the lead of several ranks, each on a card of its own.

Knows nothing of schedulers. The lead passes every plan to the others by shared memory and runs its own part on its
card; ranks meet on the cards. Their logits and what they appended to KV are in host memory when the step ends, and
the lead chooses tokens there, as of ranks on a CPU.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.cuda.card_locks import TakenCard
from baton.engine.backends.cuda.warming import warm_steps
from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.native.step_runner import StepRunner
from baton.engine.backends.ranks.cards.load import LoadedCard
from baton.engine.backends.ranks.cards.shared import card_ranks, card_sizes, choose, declare, done, give
from baton.engine.backends.ranks.followers import Followers, RoomPlan
from baton.engine.backends.ranks.memory import MOST_ROWS, DealStruct, SharedMemory, dismiss
from baton.engine.backends.residency import PageResidency
from baton.engine.plan import ModelSpec, StepPlan
from baton.kernels.collective.native import RankIsLost
from baton.kernels.cuda.library import DeviceError, on_shim
from baton.kernels.step.structs import Step
from baton.protos.channel import HostSender
from baton.protos.errors import BatonError, ConfigError, RankLost
from baton.protos.measurements import EngineWork, ExpertRows
from baton.protos.nouns import BLOCK_TOKENS, KvLayout


class CardRanksRunner(StepRunner):
    """Implements ``Runner`` and ``Ranks`` on several cards, as the lead of ``followers``, whose rooms have the
    handles ``rooms``, by rank from 1 on.

    ``bound_s`` limits the seconds of waiting for another rank. The lead's card is ``taken`` until it leaves.
    """

    keeps_bits = False  # as on one card

    def __init__(
        self,
        spec: ModelSpec,
        loaded: LoadedCard,
        followers: Followers,
        rooms: Sequence[bytes],
        bound_s: float,
        clock: Callable[[], float] = time.perf_counter,
        work: EngineWork | None = None,
        taken: TakenCard | None = None,
    ) -> None:
        super().__init__(spec, loaded.card.program, clock, work)
        self._taken = taken
        self._card, self._followers = loaded.card, followers
        self._count = loaded.own.rank.count
        self._memory = SharedMemory.create(card_sizes(loaded.own, self._rope.width))
        self._ranks = card_ranks(self._memory, loaded.own, bound_s)
        self._give = give()
        self._shown = self._made = 0  # positions whose rotary angles are in shared memory; those of the table
        self._resident = PageResidency(0)
        self._buffer: memoryview | None = None
        self.warms = not on_shim()
        handles = (loaded.card.rooms.handle, *rooms)
        followers.share(self._memory.fd, self._memory.sizes.total)
        followers.link(RoomPlan(handles))
        self._card.join(self._memory, handles, bound_s)

    @property
    def ranks(self) -> CardRanksRunner:
        """Returns this runner, which implements ``Ranks`` itself."""
        return self

    def expert_rows(self) -> ExpertRows | None:
        """Returns None: layers of experts run on one card."""
        return None

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the KV pages of the lead; ``open_pages`` passes them to the other ranks. Raises
        ConfigError if the card has too little memory.
        """
        self._buffer, self._pages, self._resident = buffer, pages, PageResidency(pages)
        self._card.bind(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), pages)

    def open_pages(self, fd: int, size: int, layout: KvLayout | None = None) -> None:
        """Passes the pages of ``bind``, memory file ``fd`` of ``size`` bytes, to the other ranks, and returns when
        their cards have them. Raises ConfigError if one has too little memory, StartupError if its process ended.
        """
        self._followers.share(fd, size)
        for follower in self._followers.all:  # pinning takes seconds, longer than a step may stand still
            follower.await_ready()

    @property
    def senders(self) -> tuple[HostSender, ...]:
        """Returns (): the lead's host sends whole pages."""
        return ()

    @property
    def receivers(self) -> tuple[HostSender, ...]:
        """Returns (): the lead's host receives whole pages."""
        return ()

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """Calls ``lost`` if another rank's process ends unexpectedly; a step in progress then raises RankLost."""
        self._followers.watch(self._memory.meeting, lost)

    def leave(self) -> None:
        """Ends the processes of the other ranks, and frees the lead's card."""
        self._followers.leave(lambda: dismiss(self._ranks))
        self._card.close()
        if self._taken is not None:
            self._taken.release()

    def pids(self) -> list[int]:
        """Returns the process ids of the other ranks."""
        return self._followers.pids()

    def counts(self) -> dict[str, int]:
        """Returns the numbers of steps and pages on the lead's card, as ``Card.counts``."""
        return self._card.counts()

    def warm(self, sequences: int, chunk: int, drafts: int = 0) -> None:
        """Grows the cards' workspaces to what a step of ``sequences`` decodes, ``drafts`` drafts and ``chunk``
        tokens of a prompt needs, and captures the graphs of up to ``sequences`` decodes. No page may be in use.
        Raises ConfigError if the lead's card has too little memory, and RankLost.
        """
        if not self.warms:
            return
        context = min(self.spec.max_model_len, self._pages * BLOCK_TOKENS)
        try:
            with torch.inference_mode():
                for plan in warm_steps(sequences, chunk, self._pages, context, drafts):
                    batch = NativeBatch(plan, self.spec.vocab_size, self._pages)
                    batch.reach = context
                    self._launch(batch, [])
        except RankLost as error:
            if not isinstance(error.__cause__, DeviceError):
                raise
            text = f"a card has no room for a step of {sequences} sequences, {drafts} drafts and {chunk} tokens"
            text = f"{text}: {error.__cause__}; lower worker.max_batch or the memory for KV"
            raise ConfigError(text, "max_batch") from error

    def _compute(self, plan: StepPlan, batch: NativeBatch) -> None:
        brought = self._resident.missing(plan.items)
        self._launch(batch, brought)
        self._resident.ran(plan.items, brought)

    def _launch(self, batch: NativeBatch, brought: list[int]) -> None:
        self._show_angles(batch.reach)
        step, pages = self._step(batch), np.array(brought, np.int32)
        deal = DealStruct(parts=1, brought=pages.ctypes.data, brought_count=len(pages), positions=self._shown)
        table = batch.flat.ctypes.data, len(batch.flat)
        if self._give(ctypes.byref(step), *table, ctypes.byref(deal), ctypes.addressof(self._ranks)):
            text = f"a step of {batch.rows} tokens is more than {MOST_ROWS} that ranks share memory for"
            raise BatonError(f"{text}; lower worker.prefill_chunk_tokens", "worker.prefill_chunk_tokens")
        self._run_own(step, pages)
        choose(self._ranks, step)

    def _run_own(self, step: Step, brought: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        """Runs the lead's part of a step, and returns when all ranks have run theirs. Raises RankLost."""
        try:
            self._card.run(step, brought.ctypes.data, len(brought), self._shown)
            code = self._card.rooms.lost()
        except DeviceError as error:  # the others have begun, and can't do the step again
            declare(self._ranks, 1)
            raise RankLost(f"rank 0: the step failed on its card: {error}", rank=0) from error
        if code := declare(self._ranks, code) if code else done(self._ranks):
            lost = RankIsLost(code)
            raise RankLost(f"{lost}, of {self._count} ranks", rank=lost.rank)

    def _show_angles(self, positions: int) -> None:
        """Copies the table of rotary angles to the shared memory."""
        self._reach(min(positions, self.spec.max_model_len))
        if len(self._rope_angles) > self._made:
            shown = self._rope_angles[: self._memory.sizes.rope_angles // (4 * self._rope_angles.shape[1])]
            ctypes.memmove(self._memory.rope_angles, shown.data_ptr(), shown.numel() * 4)
            self._shown, self._made = len(shown), len(self._rope_angles)

    def _rows(self, batch: NativeBatch, name: str, rows: slice) -> Tensor:
        found = torch.empty(rows.stop - rows.start, self._program.widths[self._program.registers[name]])
        try:
            self._card.read(name, rows.start, len(found), found.data_ptr())
        except DeviceError as error:
            raise BatonError(f"device cuda: {error}") from error
        return found
