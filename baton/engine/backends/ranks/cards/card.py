"""Runs one rank's part of a step on its card: its session, and the room by which it meets the others.

Knows nothing of plans' owners or of the other ranks' processes. The lead and its followers have one each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from baton.engine.backends.cuda.runner import BY_GRAPH
from baton.engine.backends.native.batch import Array
from baton.engine.backends.ranks.cards.program import CardProgram
from baton.engine.backends.ranks.memory import SharedMemory
from baton.kernels.abi.native import I32
from baton.kernels.collective.cards import ExchangeStruct, Rooms
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.kernels.step.structs import CHOICE, KV_TYPES, Step
from baton.protos.errors import ConfigError
from baton.protos.nouns import KvLayout


class CardRankStruct(ctypes.Structure):
    """Mirrors the C struct CardRank of step/card_rank.h."""

    _fields_ = (
        ("exchange", ExchangeStruct),
        *((name, I32) for name in ("kv_heads", "first_kv", "layers", "kv_type", "first_token", "tokens")),
    )


class Card:
    """The session of a rank with ``program``, whose pages have the layout ``layout``, on the card of the calling
    thread.

    Every method may raise DeviceError.
    """

    def __init__(self, program: CardProgram, layout: KvLayout, rooms: Rooms, device: CudaLibrary) -> None:
        self.program, self.rooms = program, rooms
        self._layout, self._device = layout, device
        self._session = ctypes.c_void_p()
        first, end = program.own.vocab
        device.call("session_open", program.address, end - first, ctypes.byref(self._session))
        self._memory: SharedMemory | None = None
        self.exchange: ExchangeStruct | None = None  # the view of all ranks' rooms, once the rank has joined them
        self._positions = 0  # for which the card has rotary angles
        self._choices: Array = np.zeros(0, CHOICE)

    @property
    def page_bytes(self) -> int:
        """Returns the bytes of one of the host's pages."""
        return self._layout.page_bytes

    def join(self, memory: SharedMemory, handles: Sequence[bytes], bound_s: float) -> None:
        """Opens the rooms of all ranks, which are given by their ``handles``; ``memory`` is shared with them.

        ``bound_s`` limits the seconds of waiting for another rank.
        """
        own, program = self.program.own, self.program.own.program
        (first_kv, _), (first, end) = own.own_kv, own.vocab
        self.exchange = self.rooms.open(handles, own.rank.index, bound_s)
        struct = CardRankStruct(
            self.exchange,
            *(program.kv_heads, first_kv, program.layers, KV_TYPES[self._layout.dtype]),
            *(first, end - first),
        )
        self._memory = memory
        self._device.call("session_join", self._session, ctypes.byref(struct), memory.meeting)

    def bind(self, at: int, pages: int) -> None:
        """Uses the memory at ``at`` as the host's KV pages, and allocates as many with the rank's heads. Raises
        ConfigError if there is too little memory.
        """
        try:
            self._device.call("session_bind", self._session, at, pages, self._layout.page_bytes, None)
        except DeviceError as error:
            text = f"device cuda: {pages} pages of KV can't be pinned, or their heads had on the card: {error}"
            raise ConfigError(f"{text}; lower worker.kv_memory_bytes or worker.pages", "kv_memory_bytes") from error

    def run(self, step: Step, brought: int | None, count: int, positions: int) -> None:
        """Runs the rank's part of ``step``, given by host addresses; its logits of sampled rows are in the shared
        memory then.

        ``count`` page numbers at ``brought`` are copied from the host before, and there are rotary angles for
        ``positions``.
        """
        memory, call, session = self._memory, self._device.call, self._session
        assert memory is not None, "the rank has not joined the others"
        if positions > self._positions:
            call("session_angles", session, memory.rope_angles, positions * step.angles_stride * 4)
            self._positions = positions
        if count:
            call("session_admit", session, brought, count)
        own, sampled = Step.from_buffer_copy(step), step.sampled_count
        own.choices = choices = self._asked(memory.logits, sampled)
        call("session_upload", session, ctypes.byref(own), BY_GRAPH)
        call("session_run", session, 0, len(self.program.ops), 1)
        call("session_fetch", session, choices, sampled)

    def read(self, name: str, first: int, count: int, to: int) -> None:
        """Copies rows of register ``name`` of the last step to address ``to``."""
        self._device.call("session_read", self._session, self.program.registers[name], first, count, to)

    def counts(self) -> dict[str, int]:
        """Returns the numbers of steps run without a graph ("plain"), graphs "captured" and "replayed", and pages
        copied to the card ("admitted").
        """
        found = (ctypes.c_int64 * 5)()
        self._device.call("session_counts", self._session, found)
        return dict(zip(("plain", "captured", "replayed", "admitted"), found, strict=False))

    def close(self) -> None:
        """Frees all device memory."""
        if self._session:
            self._device.call("session_close", self._session)
            self._session = ctypes.c_void_p()
            self.program.close()
            self.rooms.close()

    def _asked(self, logits: int, count: int) -> int:
        """Returns the address of choices that ask for the rank's columns of ``count`` rows of all ranks' logits."""
        if len(self._choices) < count:
            self._choices = np.zeros(2 * count, CHOICE)
            self._choices["repetition"] = self._choices["top_p"] = 1.0
            first = logits + 4 * self.program.own.vocab[0]
            stride = 4 * self.program.program.vocab_size
            self._choices["logits"] = first + stride * np.arange(2 * count, dtype=np.uint64)
        return int(self._choices.ctypes.data)
