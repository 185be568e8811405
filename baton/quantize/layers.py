"""Cuts a model's program into layers, and runs a layer piece by piece over the samples of a calibration text.

Knows nothing of rounding. All samples have the same length. Registers that live from one piece to the next are kept
in files, so that memory holds one sample's rows; K and V live within the piece that attends to them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.torch.batch import BatchBuilder
from baton.engine.backends.torch.interpreter import Interpreter, KvPages, Registers
from baton.engine.plan import SequenceStep, StepPlan
from baton.engine.program.ops import Embedding, Linear, Moe, Op, PagedAttention, RopeAppend
from baton.engine.program.program import Program
from baton.kernels.registry import kernels
from baton.kv.layout.page import layout_for
from baton.kv.layout.state import state_pages
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS, KvLayout
from baton.quantize.kv_scales import channel_peaks, joined
from baton.quantize.registers import live, reads, weights_of, writes
from baton.quantize.schemes import Recipe


def layers_of(program: Program) -> list[tuple[Op, ...]]:
    """Returns the ops of each layer, without the embedding and the head."""
    found: dict[str, list[Op]] = {}
    at = "0"  # ops without weights of a layer, before the first one's
    for op in program.ops[1:-1]:
        at = next((name.split(".")[0] for name in sorted(weights_of((op,)))), at)
        found.setdefault(at, []).append(op)
    return [tuple(ops) for ops in found.values()]


def require_own_kv(program: Program) -> None:
    """Raises ConfigError if layers read the K and V of others: over a text, layers run one by one."""
    slots = [op.layer for op in program.ops if isinstance(op, PagedAttention)]
    if len(set(slots)) < len(slots):
        text = "reads a text layer by layer, and some layers of this model read the K and V of others"
        raise ConfigError(f"the method {text}; use --method rtn, nf4, fp8 or mxfp4", "method")


def plain_products(program: Program, recipe: Recipe) -> frozenset[str]:
    """Returns the weights of linear ops that stay as they are: routers and what is no layer's, or all where only
    experts are quantized.
    """
    if not recipe.takes_experts_only:
        return program.routers | outside_layers(program)
    return frozenset(op.weight for op in program.ops if isinstance(op, Linear))


def has_experts(program: Program) -> bool:
    """Returns whether any layer of the program chooses among experts."""
    return any(isinstance(op, Moe) for op in program.ops)


def outside_layers(program: Program) -> frozenset[str]:
    """Returns the weights of linear ops that belong to no layer."""
    return frozenset(op.weight for op in program.ops if isinstance(op, Linear) and "." not in op.weight)


def pieces_of(ops: Sequence[Op], plain: frozenset[str]) -> Iterator[tuple[tuple[Op, ...], Linear | Moe | None]]:
    """Yields runs of ops, each with the linear or MoE op after it that is to be quantized; None after the last
    run. Linear ops of the weights ``plain`` aren't.
    """
    piece: list[Op] = []
    for op in ops:
        if isinstance(op, Moe) or (isinstance(op, Linear) and op.weight not in plain):
            yield tuple(piece), op
            piece = []
        piece.append(op)
    yield tuple(piece), None


def require_known(program: Program) -> None:
    """Raises ConfigError if the program has an op that can't be quantized layer by layer."""
    for op in program.ops[1:-1]:
        reads(op)


class States:
    """The registers of every sample, in a file each: (samples, tokens, width) float32."""

    def __init__(self, folder: Path, samples: int, tokens: int) -> None:
        self.folder, self.samples, self.tokens = folder, samples, tokens
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, sample: int, names: Iterable[str]) -> Registers:
        """Returns the registers ``names`` of one sample, (tokens, width) each."""
        return {name: self._read(sample, self.folder / name) for name in names}

    def names(self) -> list[str]:
        """Returns the names of the stored registers."""
        return sorted(path.name for path in self.folder.iterdir() if not path.suffix)

    def write(self, sample: int, name: str, rows: Tensor) -> None:
        """Appends one register of one sample to a new file beside the old one; samples must come in order."""
        with (self.folder / f"{name}.new").open("ab" if sample else "wb") as file:
            rows.contiguous().numpy().tofile(file)

    def advance(self, keep: Iterable[str]) -> None:
        """Replaces old registers by those written since, and deletes the registers that are not in ``keep``."""
        for path in self.folder.glob("*.new"):
            path.rename(path.with_suffix(""))
        for name in set(self.names()) - set(keep):
            (self.folder / name).unlink()

    def copy(self, folder: Path) -> States:
        """Returns a copy in ``folder``, whose previous content is deleted."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return States(folder, self.samples, self.tokens)

    def _read(self, sample: int, path: Path) -> Tensor:
        size = path.stat().st_size // self.samples
        found = np.fromfile(path, np.float32, size // 4, offset=sample * size)
        return torch.from_numpy(found).view(self.tokens, -1)


class LayerRun:
    """Runs ops of one layer over every sample, with the current values of ``weights``."""

    def __init__(self, program: Program, ops: Sequence[Op], weights: dict[str, Tensor], tokens: int) -> None:
        own = tuple(_alone(op) for op in ops)
        window = next((op.window for op in own if isinstance(op, PagedAttention)), program.groups[0].window)
        group = next(group for group in program.groups if group.window == window)
        planes = tuple(msgspec.structs.replace(plane, layers=1) for plane in program.states)
        self._program = msgspec.structs.replace(
            program, ops=own, groups=(msgspec.structs.replace(group, layers=1),), states=planes
        )
        self._weights, self._kernels = weights, kernels()
        self.kv_peaks: Tensor | None = None  # (2, channels) of all K and V so far, once they were stored
        self._layout = layout_for("float32", self._program.groups, states=planes)
        pages, state = -(-tokens // BLOCK_TOKENS), state_pages(self._layout)
        self._kv = page_views(self._program, self._layout, pages + state)
        state_to = range(pages, pages + state)
        step = SequenceStep(0, [0] * tokens, 0, range(pages), is_prefill=True, state_to=state_to)
        self._batch = BatchBuilder(self._program, torch.float32, "cpu").build(StepPlan((step,)))

    def run(self, ops: Sequence[Op], states: States, after: Iterable[str]) -> None:
        """Runs ``ops`` over every sample; afterwards ``states`` holds the registers ``after``."""
        after, needed = set(after), live(ops, after)
        piece = msgspec.structs.replace(self._program, ops=tuple(_alone(op) for op in ops))
        interpreter = Interpreter(piece, self._weights, self._kernels, self._layout)
        changed = {name for op in ops for name in writes(op)} & after
        stores = not self._program.states and any(isinstance(op, RopeAppend) for op in ops)
        with torch.inference_mode():
            for sample in range(states.samples):
                registers = states.read(sample, needed)
                interpreter.run(registers, self._batch, self._kv)
                if stores:
                    self.kv_peaks = joined(self.kv_peaks, channel_peaks(self._kv.rows, BLOCK_TOKENS))
                for name in changed:
                    states.write(sample, name, registers[name])
        states.advance(after)


def embed(
    program: Program,
    rows: Callable[[str, Sequence[int]], Tensor],
    samples: Sequence[Sequence[int]],
    states: States,
) -> None:
    """Writes the embedding of the samples' tokens, the first layer's input, to ``states``; ``rows`` returns the
    float32 rows of a weight that token ids name.
    """
    first = program.ops[0]
    assert isinstance(first, Embedding)
    for sample, ids in enumerate(samples):
        states.write(sample, first.out, rows(first.weight, ids) * first.scale)
    states.advance({first.out})


def _alone(op: Op) -> Op:
    """Returns ``op`` with layer number 0, for a program of one layer."""
    return msgspec.structs.replace(op, layer=0) if hasattr(op, "layer") else op


def page_views(program: Program, layout: KvLayout, pages: int) -> KvPages:
    """Returns new memory for ``pages`` pages of ``layout``, float32, as the ops of ``program`` read it."""
    memory = torch.zeros(pages, layout.page_bytes, dtype=torch.uint8)
    flat = memory.view(-1).view(torch.float32)
    rows = flat.view(-1, program.kv_heads * program.head_dim)
    blocks = flat.view(-1, BLOCK_TOKENS, program.kv_heads, program.head_dim)
    return KvPages(flat.view(pages, -1), rows, blocks, memory)
