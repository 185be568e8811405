"""Runs steps of decodes as captured graphs, one per size, made before traffic.

Knows nothing of requests or of how a graph is captured. A size is a number of rows and one of blocks; a step takes
the smallest that holds it. A step that fits none, or that has anything but decodes, is run op by op, and so is one
whose sequences are so unequal in length that a table as wide as the longest one's would read far more than they
hold. A graph whose result differs from that of its ops run one by one isn't used, nor is one that is slower.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.engine.backends.cuda.op_trials import OpTrial, compare_ops
from baton.engine.backends.cuda.warming import sizes
from baton.engine.backends.torch.batch import StepBatch, begun_pages
from baton.engine.backends.torch.capture import Capture, Run
from baton.engine.backends.torch.decode_inputs import DecodeInputs, DecodeSize
from baton.engine.backends.torch.interpreter import Interpreter, KvPages, Registers
from baton.engine.backends.torch.kept_choices import TriedWay
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.program import Program
from baton.engine.program.rope import RopeTables
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS, Sampling

log = logging.getLogger("baton.engine")

STEPS, GRAPH, OP_BY_OP = "decode steps", "graph", "op by op"
KIND = "decode-graphs"  # of kept choices
LEAST_BLOCKS = 8  # of a graph's tables: 128 tokens
MOST_GRAPHS = 160  # each takes some MB of a card's memory besides what all share
LONGEST_S = 120.0  # seconds of a start after which no further size is captured
IDLE_BYTES = 512 << 20  # bytes of KV that a step may read in vain, about the time of its ops' launches
SPARE_BYTES = 512 << 20  # bytes that stay free on the card beside graphs
GREEDY = SampleSpec(Sampling(temperature=0.0), 0, 1, [0], 1)


@dataclass(frozen=True)
class DecodeGraph:
    """A step of one size: where its inputs are, and what runs it."""

    inputs: DecodeInputs
    replay: Run


class DecodeGraphs:
    """Captures and runs the decodes of ``program`` over ``kv``, whose last page is spare.

    ``plain`` runs a step without a graph, by whatever computes it then; a graph is to be faster than that.
    """

    def __init__(
        self,
        program: Program,
        interpreter: Interpreter,
        kv: KvPages,
        dtype: torch.dtype,
        capture: Capture,
        plain: Callable[[StepPlan], object],
    ) -> None:
        self._program, self._interpreter, self._kv, self._dtype = program, interpreter, kv, dtype
        self._capture, self._plain, self._device = capture, plain, kv.pages.device.type
        self._pages, self._page_bytes = len(kv.pages) - 1, kv.pages[0].nbytes
        self._ropes = RopeTables(program.ropes, program.rotated, program.max_position)
        self._graphs: dict[DecodeSize, DecodeGraph] = {}
        self._logits = torch.empty(0)
        self._batch: StepBatch | None = None  # of any size, for what a step returns beside logits
        self.trials: tuple[OpTrial, ...] = ()
        self.why = ""  # what a trial found wrong

    @property
    def choice(self) -> TriedWay:
        """Returns whether decodes run by graphs, with the figures of each number of rows."""
        if self._graphs:
            return TriedWay(STEPS, GRAPH, OP_BY_OP, GRAPH, "", self.trials)
        why = self.why or ("it is faster" if self.trials else "there was no room for a graph")
        return TriedWay(STEPS, OP_BY_OP, GRAPH, GRAPH, why, self.trials)

    @property
    def captured(self) -> tuple[DecodeSize, ...]:
        """Returns the sizes that have a graph, in ascending order."""
        return tuple(sorted(self._graphs))

    def step(self, items: Sequence[SequenceStep]) -> tuple[StepBatch, Registers] | None:
        """Computes the step of ``items`` by a graph, writing its K and V; returns None, and does nothing, where
        none is to run it. Its logits are overwritten by the next step.
        """
        if (size := self._size_of(items)) is None or self._batch is None:
            return None
        begun = [page for item in items for page in begun_pages(item)]
        if begun:
            self._kv.pages.index_fill_(0, torch.tensor(begun, device=self._device), 0.0)
        graph = self._graphs[size]
        graph.inputs.fill(items)
        graph.replay()
        sampled = tuple((item, spec) for item in items for spec in item.asks)
        return self._batch._replace(sampled=sampled), {"logits": self._logits[: len(items)]}

    def warm(self, sequences: int, context: int) -> None:
        """Captures all sizes of up to ``sequences`` decodes of up to ``context`` tokens, before pages have anything
        in them. Sizes for which there is no memory or no time are left out, and all if a graph is wrong. Raises
        ConfigError if the card isn't usable any more.
        """
        began, slower = time.monotonic(), set[int]()
        self._logits = torch.empty((sequences, self._program.vocab_size), device=self._device)
        wanted = list(self._wanted(sequences, context))
        for size in wanted[:MOST_GRAPHS]:
            if time.monotonic() - began > LONGEST_S or self._is_full():
                break
            if size.rows in slower:
                continue
            try:
                trial = self._add(size, timed=size.blocks == LEAST_BLOCKS)
            except torch.OutOfMemoryError:
                self._graphs.pop(size, None)
                break
            except ConfigError:
                raise
            except Exception as error:  # whatever a library says that can't be captured
                self._refuse(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
                return
            if not trial.right:
                self._refuse(f"{trial.op}: the graph's result isn't that of its ops")
                return
            self.trials += (trial,) if trial.own_us else ()
            if trial.own_us > trial.torch_us:
                slower.add(size.rows)
                del self._graphs[size]
        took = time.monotonic() - began
        log.info("%d of %d sizes of decodes run as graphs; it took %.1f s", len(self._graphs), len(wanted), took)

    def _wanted(self, sequences: int, context: int) -> Iterator[DecodeSize]:
        """Yields all sizes that steps on these pages may have, short sequences and small batches first."""
        blocks, most = LEAST_BLOCKS, min(-(-context // BLOCK_TOKENS), self._pages)
        while True:
            for rows in reversed(sizes(sequences)):
                if rows <= self._pages:
                    yield DecodeSize(rows, blocks)
            if blocks >= most:
                return
            blocks *= 2

    def _size_of(self, items: Sequence[SequenceStep]) -> DecodeSize | None:
        """Returns the smallest size with a graph that holds ``items``, if they are to run by it."""
        if not items or not all(map(_is_plain, items)):
            return None
        held = [item.start // BLOCK_TOKENS + 1 for item in items]
        fitting = [one for one in self._graphs if one.rows >= len(items) and one.blocks >= max(held)]
        if not fitting:
            return None
        size = min(fitting, key=lambda one: (one.rows * one.blocks, one))
        idle = (size.rows * size.blocks - sum(held)) * self._page_bytes
        return size if idle <= IDLE_BYTES else None

    def _add(self, size: DecodeSize, timed: bool) -> OpTrial:
        """Captures the step of ``size``; returns the trial of its replay beside its ops one by one."""
        inputs = DecodeInputs(self._program, size, self._dtype, self._device, self._ropes, self._pages)
        out = self._logits[: size.rows]

        def run() -> None:
            out.copy_(self._by_ops(inputs))

        inputs.fill(self._trial_items(size))
        replay = self._capture(run)
        self._graphs[size] = DecodeGraph(inputs, replay)
        items = self._trial_items(size, 5)  # other tokens than those of the capture, which the graph must read anew
        inputs.fill(items)
        wanted = self._by_ops(inputs)
        self._batch = self._batch or inputs.batch()._replace(jobs={}, slots=())
        out.fill_(torch.nan)
        replay()
        name = f"decode step of {size.rows} rows, up to {size.blocks * BLOCK_TOKENS} tokens"
        by_graph, by_ops = partial(self.step, items), partial(self._plain, StepPlan(tuple(items)))
        return compare_ops(name, by_graph, by_ops, wanted, self._device, out.clone(), timed)

    def _by_ops(self, inputs: DecodeInputs) -> Tensor:
        registers: Registers = {}
        self._interpreter.run(registers, inputs.batch(), self._kv)
        return registers["logits"]

    def _trial_items(self, size: DecodeSize, seed: int = 0) -> list[SequenceStep]:
        """Returns decodes at the end of as many blocks, each on a page of its own, over and over."""
        last = min(size.blocks * BLOCK_TOKENS, self._program.max_position) - 1
        vocab = self._program.vocab_size
        return [
            SequenceStep(row, [(7 * row + 3 + seed) % vocab], last, [row] * size.blocks, GREEDY)
            for row in range(size.rows)
        ]

    def _refuse(self, why: str) -> None:
        self._graphs, self.why = {}, why
        log.warning("decodes are launched op by op: %s", why)

    def _is_full(self) -> bool:
        return self._device == "cuda" and torch.cuda.mem_get_info()[0] < SPARE_BYTES


def captures(program: Program) -> bool:
    """Returns whether the ops of ``program`` never wait for the card, which routing to experts does here."""
    return not program.experts


def _is_plain(item: SequenceStep) -> bool:
    """Returns whether the item is one decode and nothing beside it."""
    one = len(item.tokens) == 1 and item.sample is not None and not item.verify and not item.targets
    return one and not (item.pool or item.adapter or item.watch is not None or item.gap != (0, 0))
