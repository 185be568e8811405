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
from baton.engine.program.ops import Embedding, Linear, Moe, Op, PagedAttention, RmsNorm, RopeAppend, SwiGlu
from baton.engine.program.program import Program
from baton.kernels.registry import kernels
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS


def layers_of(program: Program) -> list[tuple[Op, ...]]:
    """Returns the ops of each layer, without the embedding and the head."""
    found: dict[str, list[Op]] = {}
    at = ""
    for op in program.ops[1:-1]:
        at = op.weight.split(".")[0] if isinstance(op, RmsNorm | Linear) else at
        found.setdefault(at, []).append(op)
    return [tuple(ops) for ops in found.values()]


def pieces_of(program: Program, ops: Sequence[Op]) -> Iterator[tuple[tuple[Op, ...], Linear | Moe | None]]:
    """Yields runs of ops, each with the linear or MoE op after it that is to be quantized; None after the last
    run.
    """
    piece: list[Op] = []
    for op in ops:
        if isinstance(op, Moe) or (isinstance(op, Linear) and op.weight not in program.routers):
            yield tuple(piece), op
            piece = []
        piece.append(op)
    yield tuple(piece), None


def reads(op: Op) -> set[str]:
    """Returns the registers that an op of a layer reads. Raises ConfigError for an unsupported op."""
    match op:
        case RmsNorm():
            return {op.x, op.delta} if op.delta else {op.x}
        case Linear():
            return {op.x}
        case RopeAppend():
            return {op.qkv}
        case PagedAttention():
            return {op.q}
        case SwiGlu():
            return {op.gate_up}
        case Moe() if op.gate is None:
            return {op.x, op.logits}
    raise ConfigError(f"{type(op).__name__}: this architecture has an op that baton quantize doesn't know", "model")


def require_known(program: Program) -> None:
    """Raises ConfigError if the program has an op that can't be quantized layer by layer."""
    for op in program.ops[1:-1]:
        reads(op)


def writes(op: Op) -> set[str]:
    """Returns the registers that an op writes."""
    return {op.x, op.out} if isinstance(op, RmsNorm) else {getattr(op, "out", "logits")}


def live(ops: Iterable[Op], after: Iterable[str]) -> set[str]:
    """Returns the registers that ``ops`` read before writing them, and those of ``after`` that ``ops`` don't
    write.
    """
    found = set(after)
    for op in reversed(list(ops)):
        found = (found - writes(op)) | reads(op)
    return found


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
        window = next(op.window for op in own if isinstance(op, PagedAttention))
        group = next(group for group in program.groups if group.window == window)
        self._program = msgspec.structs.replace(
            program, ops=own, groups=(msgspec.structs.replace(group, layers=1),)
        )
        self._weights, self._kernels = weights, kernels()
        pages = -(-tokens // BLOCK_TOKENS)
        self._kv = _pages(self._program, pages)
        step = SequenceStep(0, [0] * tokens, 0, range(pages), is_prefill=True)
        self._batch = BatchBuilder(self._program, torch.float32, "cpu").build(StepPlan((step,)))

    def run(self, ops: Sequence[Op], states: States, after: Iterable[str]) -> None:
        """Runs ``ops`` over every sample; afterwards ``states`` holds the registers ``after``."""
        after, needed = set(after), live(ops, after)
        piece = msgspec.structs.replace(self._program, ops=tuple(_alone(op) for op in ops))
        interpreter = Interpreter(piece, self._weights, self._kernels)
        changed = {name for op in ops for name in writes(op)} & after
        with torch.inference_mode():
            for sample in range(states.samples):
                registers = states.read(sample, needed)
                interpreter.run(registers, self._batch, self._kv)
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
    return msgspec.structs.replace(op, layer=0) if isinstance(op, RopeAppend | PagedAttention) else op


def _pages(program: Program, pages: int) -> KvPages:
    flat = torch.zeros(pages * 2 * BLOCK_TOKENS * program.kv_heads * program.head_dim)
    rows = flat.view(-1, program.kv_heads * program.head_dim)
    return KvPages(flat.view(pages, -1), rows, flat.view(-1, BLOCK_TOKENS, program.kv_heads, program.head_dim))
