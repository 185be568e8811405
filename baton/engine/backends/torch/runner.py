"""Implements a runner by torch's ops over paged KV in shared memory.

Knows nothing of schedulers, leases or processes. KV is always in host memory, from which the I/O process sends it
and to which it writes; on a GPU torch's ops (card_pages.py) and the engine's own kernels (backends/cuda/runner.py)
keep a mirror.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from baton.engine.adapters.base import AdapterBase
from baton.engine.backends.sequence_checks import require_computable
from baton.engine.backends.torch.adapters import TorchAdapters
from baton.engine.backends.torch.batch import BatchBuilder, StepBatch
from baton.engine.backends.torch.capture import Capture
from baton.engine.backends.torch.card_ops import CardOps
from baton.engine.backends.torch.card_pages import CardPages
from baton.engine.backends.torch.decode_graphs import DecodeGraphs, captures
from baton.engine.backends.torch.interpreter import Interpreter, KvPages, Registers
from baton.engine.checkpoints.weights import Weights
from baton.engine.plan import ModelSpec, PooledStates, SequenceStep, StepPlan, StepResult
from baton.engine.program.program import Program
from baton.engine.sampling import choose, score
from baton.kernels.registry import kernels
from baton.kv.layout.selection import selection_of
from baton.protos.measurements import EngineWork
from baton.protos.nouns import BLOCK_TOKENS, TokenLogprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchRunner:
    """Implements ``Runner`` by torch's ops. One thread at a time may call it.

    ``card`` is the device on which KV pages are mirrored; empty: they are read where they are. ``ops`` compute
    there what torch doesn't. ``capture`` makes graphs of decodes there; None: their ops are launched one by one.
    ``tell`` is called with the graphs once they are there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        program: Program,
        weights: Weights,
        work: EngineWork | None = None,
        clock: Callable[[], float] = time.perf_counter,
        adapters: AdapterBase | None = None,
        ops: CardOps = CardOps(),
        card: str = "",
        capture: Capture | None = None,
        tell: Callable[[DecodeGraphs], None] | None = None,
    ) -> None:
        self.spec, self.work = spec, work
        self.adapters = None if adapters is None else TorchAdapters(adapters)
        self._program, self._clock = program, clock
        self._dtype = DTYPES[spec.layout.dtype]
        self._kernels = kernels()
        self._draw = ops.draw or self._kernels.sample
        self._interpreter = Interpreter(program, weights, self._kernels, spec.layout, self.adapters, ops.attention)
        selection = selection_of(spec.layout)
        by_tables = ops.attention is not None
        self._builder = BatchBuilder(program, self._dtype, _device(weights), selection, card or "cpu", by_tables)
        self._kv: KvPages | None = None
        self._card = card
        self._mirror: CardPages | None = None
        self._pages = 0
        self._capture = capture if capture is not None and captures(program) else None
        self.graphs: DecodeGraphs | None = None
        self._tell = tell

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` as the KV pages, [page][layer][k|v][16][kv_heads][head_dim]. Raises ConfigError if the
        card has too little memory for their mirror.
        """
        p, size = self._program, self.spec.layout.page_bytes
        memory = torch.frombuffer(buffer, dtype=torch.uint8, count=pages * size).view(pages, size)
        if self._card:
            self._mirror = CardPages(memory, self._card)
            memory = self._mirror.memory
        flat = memory.view(-1).view(self._dtype)
        rows = flat.view(-1, p.kv_heads * p.head_dim)
        blocks = flat.view(-1, BLOCK_TOKENS, p.kv_heads, p.head_dim)
        self._kv = KvPages(flat.view(len(memory), -1), rows, blocks, memory)
        self._pages, self.graphs = pages, None

    def warm(self, sequences: int, chunk: int, drafts: int = 0) -> None:
        """Captures the steps of up to ``sequences`` decodes, where graphs are made. Raises ConfigError if that left
        the card unusable.
        """
        kv = self._kv
        if self._capture is None or self._mirror is None or kv is None:
            return
        made = DecodeGraphs(
            self._program, self._interpreter, kv, self._dtype, self._capture, lambda plan: self._computed(plan, kv)
        )
        with torch.inference_mode():
            made.warm(sequences, self.spec.max_model_len)
        self.graphs = made
        if self._tell is not None:
            self._tell(made)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step and returns its results. If it raises, the whole step has failed and may be run again,
        which repeats all of its writes.
        """
        began = self._clock()
        for item in plan.items:
            require_computable(item, self.spec.vocab_size, self._pages)
        if self.adapters is not None:
            self.adapters.require(plan.items)
        if not plan.items or self._kv is None:
            return StepResult((), self._clock() - began)
        with torch.inference_mode():
            return self._mirrored(self._mirror, plan, self._kv, began)

    def _mirrored(self, mirror: CardPages | None, plan: StepPlan, kv: KvPages, began: float) -> StepResult:
        if mirror is None:
            return self._chosen(plan, *self._computed(plan, kv), began)
        try:
            brought = mirror.bring(plan.items)
            found = self._computed(plan, kv)
            mirror.write_back(plan.items, brought)
        except BaseException:
            mirror.failed()
            raise
        return self._chosen(plan, *found, began)  # a request at fault here leaves the pages current

    def _computed(self, plan: StepPlan, kv: KvPages) -> tuple[StepBatch, Registers]:
        if self.graphs is not None and (found := self.graphs.step(plan.items)) is not None:
            return found
        batch = self._builder.build(plan)
        return batch, self._interpreter.registers(batch, kv)

    def _chosen(self, plan: StepPlan, batch: StepBatch, registers: Registers, began: float) -> StepResult:
        every = registers["logits"]
        logits = every[: len(batch.sampled)]
        specs = [spec for _, spec in batch.sampled]
        found = choose(logits, [item.seq for item, _ in batch.sampled], specs, self._draw) if specs else ()
        place = {id(item): at for at, item in enumerate(plan.items)}
        order = sorted(range(len(found)), key=lambda row: place[id(batch.sampled[row][0])])
        scored = dict(_scores(batch.scored, every[len(batch.sampled) :]))
        pooled = {
            item.seq: PooledStates.of(self._interpreter.states(registers, rows).float().cpu().numpy())
            for item, rows in batch.pooled
        }
        observed = batch.observation.found() if batch.observation else {}
        seconds = self._clock() - began
        return StepResult(tuple(found[row] for row in order), seconds, scored, pooled, observed=observed)


def _scores(items: Sequence[SequenceStep], logits: Tensor) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
    """Yields each item's scores by sequence; ``logits`` has a row for each item's targets, in order."""
    at = 0
    for item in items:
        count = len(item.targets)
        yield item.seq, score(logits[at : at + count], item.targets, item.score_top)
        at += count


def _device(weights: Weights) -> str:
    table = weights["embed"]
    return table.device.type if isinstance(table, Tensor) else "cpu"
