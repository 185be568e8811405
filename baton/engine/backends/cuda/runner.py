"""Runs steps on a GPU as a sequence of kernel launches or as a CUDA graph of them (kernels/step/session.cuh).

Knows nothing of schedulers or processes. The device's pages mirror the host's, which others read and write: pages
that a step needs and that aren't current on the device (``residency.py``) are copied there before it, and what it
appends is copied back after its last launch; or, ``on_demand``, when somebody is about to read it
(``demand_pages.py``). A handoff between two workers on one GPU goes from device pages to device pages
(``page_share.py``).
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from baton.engine.abilities import Mirror
from baton.engine.adapters.base import AdapterBase
from baton.engine.backends.cuda.adapters import CudaAdapters
from baton.engine.backends.cuda.async_steps import CudaSteps
from baton.engine.backends.cuda.demand_pages import DemandPages
from baton.engine.backends.cuda.page_share import PageShare
from baton.engine.backends.cuda.program import CudaProgram
from baton.engine.backends.cuda.step_choice import StepChoice, chosen, measured, small_steps
from baton.engine.backends.cuda.warming import captured_steps, largest_step, loudest_step
from baton.engine.backends.native.batch import Array, NativeBatch
from baton.engine.backends.native.branches import copyable, slots_of
from baton.engine.backends.native.program import Weights
from baton.engine.backends.native.step_runner import StepRunner
from baton.engine.backends.residency import PageResidency
from baton.engine.plan import ModelSpec, StepPlan, StepResult
from baton.engine.program.program import Program
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.kernels.step import structs
from baton.kv.memory.host_pages import drop_bytes
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
        self.mirror: Mirror | None = None
        self._shared: PageShare | None = None
        # What is copied to the host when it is asked for is of one page table.
        self.on_demand = None if spec.layout.windows else self._on_demand
        self._copies: int | None = None  # bytes that the host keeps of copies made on demand; None: every page
        self.shares = False  # whether ``bind`` lets the I/O process at the device's pages
        self.branches = self._selection is None and not spec.layout.windows and copyable(spec.layout)
        # What a step chooses of one page table and no recurrent state is all that the next one needs.
        plain = self._selection is None and not spec.layout.windows and not spec.layout.states
        self.async_steps = CudaSteps(self, clock) if plain else None
        self.warms = False  # whether ``warm`` runs its steps
        self.compares = False  # whether ``warm`` takes the faster of graph and megakernel
        self._session = ctypes.c_void_p()
        self._resident: PageResidency | DemandPages = PageResidency(0)
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
        page_bytes, earlier = self.spec.layout.page_bytes, self._shared
        demand = None if self._copies is None else self._demand_pages(buffer, pages, self._copies // page_bytes)
        resident = demand or PageResidency(pages)
        shared = PageShare.made(pages * page_bytes, resident, demand is None) if self.shares else None
        at = None if shared is None else shared.at
        size = f"{pages * page_bytes / (1 << 30):.2f} GiB of KV pages"
        try:
            self._device.call("session_bind", self._session, self._memory.data_ptr(), pages, page_bytes, at)
        except DeviceError as error:
            if shared is not None:
                shared.close()
            text = f"device cuda: {size} can't be pinned on the host, or as many had on the card: {error}"
            raise ConfigError(f"{text}; lower worker.kv_memory_bytes or worker.pages", "kv_memory_bytes") from error
        if demand is None:
            log.info("%s are pinned, and mirrored on the card", size)
        else:
            demand.shared = None if shared is None else shared.shared
            log.info("%s are on the card, and on the host while somebody reads them", size)
        self._pages, self._resident, self.mirror, self._shared = pages, resident, demand or shared, shared
        if earlier is not None:
            earlier.close()

    def _on_demand(self, most: int) -> None:
        """Keeps KV on the card from the next ``bind`` on, whose buffer may be larger than the host's memory: pages
        are copied there when somebody wants to read them, and at most ``most`` bytes of such copies stay.
        """
        self._call("session_on_demand", self._session)
        self._copies = most

    def _demand_pages(self, buffer: memoryview, pages: int, most: int) -> DemandPages:
        page_bytes = self.spec.layout.page_bytes

        def fetch(wanted: Sequence[int]) -> None:
            named = np.array(wanted, np.int32)
            self._call("session_fetch_pages", self._session, named.ctypes.data, len(named))

        return DemandPages(pages, most, fetch, lambda page: drop_bytes(buffer, page * page_bytes, page_bytes))

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
                self._rehearse(largest_step(sequences, chunk, self._pages, context, drafts), context)
                with self._plainly():
                    self._rehearse(loudest_step(sequences, chunk, self._pages, context, drafts), context)
                for plan in captured_steps(sequences, self._pages):
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

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Lets the steps of the block be launched op by op, so that none is captured."""
        before, self.how = self.how, PLAIN
        try:
            yield
        finally:
            self.how = before

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
        self.mirror = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _compute(self, plan: StepPlan, batch: NativeBatch) -> None:
        self.begin(plan, batch)
        self.finish(batch)

    def batch_of(self, plan: StepPlan) -> NativeBatch:
        """Returns the arrays of a step. Raises BatonError for an item that can't be computed."""
        return NativeBatch(plan, self.spec.vocab_size, self._pages, self._selection)

    def result_of(self, plan: StepPlan, batch: NativeBatch, seconds: float) -> StepResult:
        """Returns the results of a finished step that took ``seconds``; pooled states only of the step that was
        begun last. Raises BatonError where a sequence had nothing to choose from.
        """
        sampled = tuple(self._chosen(batch))
        scored = dict(self._scores(batch)) if batch.scored else {}
        pooled = dict(self._pooled(plan, batch)) if batch.pools else {}
        return StepResult(sampled, seconds, scored, pooled)

    def begin(self, plan: StepPlan, batch: NativeBatch, fed: Array | None = None) -> None:
        """Launches a step, and the copy of its results to the host. ``fed`` has for each row which of the choices
        of the step before, that may still run, it takes as its token; -1: its own. Raises BatonError.

        What comes behind it on the device sees its writes, so that pages count as written from now on.
        """
        if self.adapters is not None:
            self.adapters.group(plan.items, batch.wanted)
        brought = self._resident.missing(plan.items)
        with self._failing():
            self._submit(batch, brought, fed)
            self._device.call("session_begin_fetch", self._session, batch.choices.ctypes.data, len(batch.choices))
        self._resident.ran(plan.items, brought)

    def finish(self, batch: NativeBatch) -> None:
        """Waits for the oldest step that was begun and not finished, which is that of ``batch``, and fills in its
        tokens and logits. Raises BatonError.
        """
        try:
            with self._failing():
                self._device.call("session_end_fetch", self._session, batch.choices.ctypes.data, len(batch.choices))
        finally:
            self._resident.ended()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turns what the device raises in the block into a BatonError, behind which no page counts as current."""
        try:
            yield
        except DeviceError as error:
            self._resident.failed()
            raise BatonError(f"the step failed on the GPU: {error}") from error

    def _launch(self, batch: NativeBatch, brought: list[int]) -> None:
        """Runs a step and waits for its results."""
        self._submit(batch, brought)
        self._device.call("session_fetch", self._session, batch.choices.ctypes.data, len(batch.choices))

    def _submit(self, batch: NativeBatch, brought: list[int], fed: Array | None = None) -> None:
        device, session = self._device, self._session
        if self._reach(batch.reach):
            device.call("session_angles", session, self._rope_angles.data_ptr(), self._rope_angles.nbytes)
        if brought:
            pages = np.array(brought, np.int32)
            device.call("session_admit", session, pages.ctypes.data, len(pages))
        if batch.copies:
            copies = slots_of(batch.copies)
            device.call("session_branches", session, copies.ctypes.data, len(copies))
        if fed is not None:
            device.call("session_ahead", session, fed.ctypes.data, len(fed))
        device.call("session_upload", session, ctypes.byref(self._step(batch)), self.how)
        self._run(batch.rows)

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
