"""Runs steps on a GPU as a sequence of kernel launches or as a CUDA graph of them (kernels/step/session.cuh).

Knows nothing of schedulers or processes. The device's pages mirror the host's, which others read and write: pages
that a step needs and that aren't current on the device (``residency.py``) are copied there before it, and what it
appends is copied back after its last launch. A handoff between two workers on one GPU goes from device pages to
device pages (``page_share.py``).
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton.engine.adapters.base import AdapterBase
from baton.engine.backends.cuda.adapters import CudaAdapters
from baton.engine.backends.cuda.page_share import PageShare
from baton.engine.backends.cuda.program import CudaProgram
from baton.engine.backends.cuda.step_choice import StepChoice, chosen, measured, small_steps
from baton.engine.backends.cuda.warming import largest_step, warm_steps
from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.native.program import Weights
from baton.engine.backends.native.step_runner import StepRunner
from baton.engine.backends.residency import PageResidency
from baton.engine.plan import ModelSpec, StepPlan
from baton.engine.program.program import Program
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.kernels.step import structs
from baton.protos.errors import BatonError, ConfigError
from baton.protos.measurements import EngineWork
from baton.protos.nouns import BLOCK_TOKENS

log = logging.getLogger("baton.engine")

PLAIN, BY_GRAPH, AT_ONCE = 0, 1, 2  # session.cuh: How
MOST_AT_ONCE = 8  # rows of a step by the megakernel (mega.h: MEGA_ROWS)


class CudaRunner(StepRunner):
    """Implements ``Runner`` on a GPU, by the engine's own kernels.

    ``how``: BY_GRAPH replays CUDA graphs; PLAIN launches each op by itself, for debugging; AT_ONCE runs all ops of
    a small batch except the head in one launch, if ``misfit`` finds nothing. ``adapters`` has the requirements on
    adapters, if the program is adaptable. ``by_row`` names the bf16 weights that lie row by row (products.py).
    """

    # Over 64 rows some products go by another instruction (docs/cuda.md), and prefixes may be shared.
    keeps_bits = False

    def __init__(
        self,
        spec: ModelSpec,
        program: Program,
        weights: Weights,
        device: CudaLibrary,
        clock: Callable[[], float] = time.perf_counter,
        work: EngineWork | None = None,
        how: int = BY_GRAPH,
        adapters: AdapterBase | None = None,
        by_row: frozenset[str] = frozenset(),
    ) -> None:
        made = self._cuda_program = CudaProgram(program, weights, device, by_row)
        super().__init__(spec, made, clock, work)
        self.adapters = (
            None if adapters is None else CudaAdapters(adapters, program, made.lora, made.head_lora, device)
        )
        self._device, self.how = device, how
        self.mirror: PageShare | None = None
        self.shares = False  # whether ``bind`` lets the I/O process at the device's pages
        self.warms = False  # whether ``warm`` runs its steps
        self.compares = False  # whether ``warm`` takes the faster of graph and megakernel
        self._session = ctypes.c_void_p()
        self._resident = PageResidency(0)
        try:
            self._call("session_open", self._program.address, spec.vocab_size, ctypes.byref(self._session))
        except BatonError:
            self._cuda_program.close()
            raise

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the KV pages and allocates as many on the device. Raises ConfigError if there is too
        little memory.
        """
        self._memory = torch.frombuffer(buffer, dtype=torch.uint8)  # keeps the buffer
        page_bytes, resident, earlier = self.spec.layout.page_bytes, PageResidency(pages), self.mirror
        mirror = PageShare.made(pages * page_bytes, resident) if self.shares else None
        at = None if mirror is None else mirror.at
        size = f"{pages * page_bytes / (1 << 30):.2f} GiB of KV pages"
        try:
            self._device.call("session_bind", self._session, self._memory.data_ptr(), pages, page_bytes, at)
        except DeviceError as error:
            if mirror is not None:
                mirror.close()
            text = f"device cuda: {size} can't be pinned on the host, or as many had on the card: {error}"
            raise ConfigError(f"{text}; lower worker.kv_memory_bytes or worker.pages", "kv_memory_bytes") from error
        log.info("%s are pinned, and mirrored on the card", size)
        self._pages, self._resident, self.mirror = pages, resident, mirror
        if earlier is not None:
            earlier.close()

    def warm(self, sequences: int, chunk: int, drafts: int = 0) -> None:
        """Grows workspaces to what a step of ``sequences`` decodes, ``drafts`` drafts and ``chunk`` tokens of a
        prompt needs, and captures the graphs of up to ``sequences`` decodes. Where the runner ``compares``, it
        first takes the faster way for small steps. No page may be in use. Raises ConfigError if there is too little
        memory.
        """
        if not self.warms or self.how == PLAIN:
            return
        began, before = self._clock(), self.counts()["captured"]
        context = min(self.spec.max_model_len, self._pages * BLOCK_TOKENS)
        try:
            with torch.inference_mode():
                if self.compares:
                    self._compare(sequences, chunk, context)
                if self.adapters is not None:
                    largest = largest_step(sequences, chunk, self._pages, context, drafts)
                    with self.adapters.rehearsing(largest) as adapted:
                        self._rehearse(adapted, context)
                for plan in warm_steps(sequences, chunk, self._pages, context, drafts):
                    self._rehearse(plan, context)
        except DeviceError as error:
            text = f"device cuda: the card has no room for a step of {sequences} sequences and {chunk} tokens"
            raise ConfigError(
                f"{text}: {error}; lower worker.max_batch or the memory for KV", "max_batch"
            ) from error
        captured, seconds = self.counts()["captured"] - before, self._clock() - began
        log.info("%d graphs of decodes are captured, in %.1f s", captured, seconds)

    def _compare(self, sequences: int, chunk: int, context: int) -> None:
        """Takes the megakernel for steps that it can run if it is right and faster than the graph."""
        vocab = self.spec.vocab_size
        prompts, plans = small_steps(sequences, MOST_AT_ONCE, self._pages, context, vocab, chunk)

        def timed(plan: StepPlan) -> tuple[float, list[int]]:
            began = self._clock()
            tokens = self._rehearse(plan, context)
            return self._clock() - began, tokens

        for prompt in prompts:
            self._rehearse(prompt, context)
        graph = measured(timed, plans)
        self.how = AT_ONCE
        try:
            choice = chosen(graph, measured(timed, plans))
        except DeviceError as error:
            choice = StepChoice(False, f"the megakernel failed: {error}")
        self.how = AT_ONCE if choice.mega else BY_GRAPH
        log.info("small steps go by %s: %s", "the megakernel" if choice.mega else "graph", choice.why)

    def _rehearse(self, plan: StepPlan, context: int) -> list[int]:
        """Runs a step whose pages nobody holds, with the table of rotary angles as long as it will ever be; returns
        its tokens.
        """
        batch = NativeBatch(plan, self.spec.vocab_size, self._pages)
        batch.reach = context
        if self.adapters is not None:
            self.adapters.group(plan.items, batch.wanted)
        self._launch(batch, [])
        return [int(token) for token in batch.choices["token"]]

    def share(self, least: int) -> None:
        """Lets adjacent sequences of a step that have ``least`` or more leading tokens in common read their KV once
        (cascade attention).

        0 turns that off. A sequence's result, bit by bit, then depends on whether others with its prefix are in the
        step.
        """
        self._call("session_share", self._session, least)

    def counts(self) -> dict[str, int]:
        """Returns the numbers of steps run without a graph ("plain"), graphs "captured" and "replayed", pages
        copied to the device ("admitted") and steps by the megakernel ("at_once").
        """
        found = (ctypes.c_int64 * 5)()
        self._call("session_counts", self._session, found)
        return dict(zip(("plain", "captured", "replayed", "admitted", "at_once"), found, strict=True))

    def misfit(self) -> str:
        """Returns a description of the first op for which the megakernel has no form; empty if it can run all."""
        number, why = ctypes.c_int32(), ctypes.c_char_p()
        kv = structs.KV_TYPES[self.spec.layout.dtype]
        self._call("megakernel_fits", self._program.address, kv, ctypes.byref(number), ctypes.byref(why))
        if number.value < 0:
            return ""
        op = self._program.ops[number.value]
        name = getattr(op, "weight", None) or (
            f"layer {op.layer}" if hasattr(op, "layer") else getattr(op, "out", "")
        )
        return f"op {number.value} ({type(op).__name__} {name}): {(why.value or b'').decode()}"

    def close(self) -> None:
        """Frees all device memory of this runner."""
        if self._session:
            self._call("session_close", self._session)
            self._session = ctypes.c_void_p()
            self._cuda_program.close()
            if self.adapters is not None:
                self.adapters.close()
        if self.mirror is not None:
            self.mirror.close()
            self.mirror = None

    def _compute(self, plan: StepPlan, batch: NativeBatch) -> None:
        if self.adapters is not None:
            self.adapters.group(plan.items, batch.wanted)
        brought = self._resident.missing(plan.items)
        try:
            self._launch(batch, brought)
        except DeviceError as error:
            self._resident.failed()
            raise BatonError(f"the step failed on the GPU: {error}") from error
        self._resident.ran(plan.items, brought)

    def _launch(self, batch: NativeBatch, brought: list[int]) -> None:
        device, session = self._device, self._session
        if self._reach(batch.reach):
            device.call("session_angles", session, self._rope_angles.data_ptr(), self._rope_angles.nbytes)
        if brought:
            pages = np.array(brought, np.int32)
            device.call("session_admit", session, pages.ctypes.data, len(pages))
        device.call("session_upload", session, ctypes.byref(self._step(batch)), self.how)
        self._run(batch.rows)
        device.call("session_fetch", session, batch.choices.ctypes.data, len(batch.choices))

    def _run(self, rows: int) -> None:
        """Runs the uploaded step. The head behind the megakernel is launched plainly, because a cooperative launch
        has no programmatic dependents.
        """
        run = self._session, 0, len(self._program.ops), 1
        if self.how != AT_ONCE or rows > MOST_AT_ONCE:
            self._device.call("session_run", *run)
            return
        self._device.call("device_programmatic", 0)
        try:
            self._device.call("session_run", *run)
        finally:
            self._device.call("device_programmatic", 1)

    def _rows(self, batch: NativeBatch, name: str, rows: slice) -> Tensor:
        number = self._program.registers[name]
        found = torch.empty(rows.stop - rows.start, self._program.widths[number])
        self._call("session_read", self._session, number, rows.start, len(found), found.data_ptr())
        return found

    def _call(self, name: str, *arguments: object) -> None:
        try:
            self._device.call(name, *arguments)
        except DeviceError as error:
            raise BatonError(f"device cuda: {error}") from error
