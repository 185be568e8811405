"""A random Llama of a few small layers, and its step by the CUDA ops and by the megakernel, for tests.

Knows nothing of who checks what. Everything lies in host memory, which the shim's kernels read as it is.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.native.program import NativeProgram
from baton.engine.program import ops as p
from baton.engine.program import rope
from baton.engine.program.program import Program, Rope, Weight
from baton.kernels.abi.native import I32, P
from baton.kernels.step import structs
from baton.kv.layout.page import layout_for
from baton.protos.nouns import LayerGroup

REGISTERS = ("x", "delta", "down")
PAGES, VOCAB, POSITIONS = 8 * 44, 50, 700
Kind = tuple[int, int] | torch.dtype


@dataclass(frozen=True)
class Shape:
    """Describes a Llama; its ``layers`` share their weights' sizes, not their values."""

    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    window: int = 0
    norms: bool = False
    biases: bool = False


def llama(s: Shape) -> Program:
    """Returns the program that engine/program/decoder.py makes of such a model."""
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCAB, s.hidden),
        "norm": (s.hidden,),
        "head": (VOCAB, s.hidden),
    }
    ops: list[p.Op] = [p.Embedding("embed", "x")]
    for i in range(s.layers):
        mine = {"qkv": (q + 2 * kv, s.hidden), "o": (s.hidden, q), "gate_up": (2 * s.inner, s.hidden)}
        mine |= {"down": (s.hidden, s.inner), "n1": (s.hidden,), "n2": (s.hidden,)}
        mine |= {"qn": (s.head_dim,), "kn": (s.head_dim,)} if s.norms else {}
        mine |= {"qkv_bias": (q + 2 * kv,), "down_bias": (s.hidden,)} if s.biases else {}
        shapes |= {f"{i}.{name}": shape for name, shape in mine.items()}
        bias = {name: f"{i}.{name}_bias" if s.biases else None for name in ("qkv", "down")}
        ops += [
            p.RmsNorm("x", "down" if i else None, f"{i}.n1", 1e-5, "normed"),
            p.Linear("normed", f"{i}.qkv", bias["qkv"], "qkv"),
            p.RopeAppend("qkv", i, f"{i}.qn" if s.norms else None, f"{i}.kn" if s.norms else None, 1e-6, "q"),
            p.PagedAttention("q", i, s.window if i % 2 == 0 else 0, "attended"),
            p.Linear("attended", f"{i}.o", None, "delta"),
            p.RmsNorm("x", "delta", f"{i}.n2", 1e-5, "normed"),
            p.Linear("normed", f"{i}.gate_up", None, "gate_up"),
            p.SwiGlu("gate_up", "inner"),
            p.Linear("inner", f"{i}.down", bias["down"], "down"),
        ]
    ops.append(p.LmHead("x", "down", "norm", 1e-5, "head"))
    return Program(
        tuple(ops),
        tuple(Weight(name, (name,), (shape,)) for name, shape in shapes.items()),
        (LayerGroup("full", ("k", "v"), s.layers, s.kv_heads, s.head_dim),),
        Rope("default", 1e4, {}),
        *(s.heads, s.kv_heads, s.head_dim, VOCAB, POSITIONS),
    )


@dataclass
class Batch:
    """Describes a step's rows: (tokens that are there, new ones) of each sequence, and ``padding`` rows behind
    them.
    """

    items: list[tuple[int, int]]
    padding: int = 0

    @property
    def rows(self) -> int:
        return sum(new for _, new in self.items) + self.padding

    def later(self) -> Batch:
        """The same sequences a step on."""
        return Batch([(at + new, new) for at, new in self.items], self.padding)


@dataclass
class Case:
    """A model with pages that hold what prompts would have left."""

    shape: Shape
    kind: Kind
    kv: str
    seed: int = 1
    keep: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        program = llama(self.shape)
        self.native = NativeProgram(program, trials.random_weights(program, self.kind, self.seed))
        self.layout = layout_for(self.kv, program.groups)
        inverse, factor = rope.frequencies(program.rope, program.head_dim, program.max_position)
        cos, sin = rope.tables(torch.arange(POSITIONS), inverse, factor, torch.float32)
        half = cos.shape[-1] // 2
        self.rope_angles = torch.cat((cos[:, 0, :half], sin[:, 0, half:]), -1).contiguous()
        rng = np.random.default_rng(self.seed)
        self.tables = [t.astype(np.int32) for t in np.array_split(rng.permutation(PAGES), 8)]
        self.tokens = rng.integers(0, VOCAB, (8, POSITIONS)).astype(np.int32)

    def pages(self) -> Tensor:
        return torch.zeros(PAGES * self.layout.page_bytes, dtype=torch.uint8)

    def step(self, batch: Batch, pages: Tensor) -> tuple[structs.Step, Tensor]:
        """The struct and its arena, which starts as NaN."""
        tokens, items, first = (
            np.zeros(batch.rows, np.int32),
            np.zeros(len(batch.items) + bool(batch.padding), structs.ITEM),
            0,
        )
        for i, (start, new) in enumerate(batch.items):
            tokens[first : first + new] = self.tokens[i, start : start + new]
            items[i] = (first, self.tables[i].ctypes.data, new, start)
            first += new
        if batch.padding:
            items[-1] = (first, self.tables[0].ctypes.data, 0, 0)
        arena = torch.full((batch.rows * self.native.row_floats,), float("nan"))
        self.keep = [tokens, items, arena]
        step = structs.Step(
            tokens=tokens.ctypes.data,
            items=items.ctypes.data,
            sampled=None,
            choices=None,
            angles=self.rope_angles.data_ptr(),
            pages=pages.data_ptr(),
            arena=arena.data_ptr(),
            rows=batch.rows,
            page_bytes=self.layout.page_bytes,
            layer_bytes=self.layout.page_bytes // self.shape.layers,
            angles_stride=self.rope_angles.shape[1],
            item_count=len(items),
            sampled_count=0,
            kv_type=structs.KV_TYPES[self.kv],
        )
        return step, arena

    def by_ops(self, library: ctypes.CDLL, batch: Batch, pages: Tensor) -> list[Tensor]:
        """The registers of all rows, by launches; the head is left out."""
        step, arena = self.step(batch, pages)
        call = library["baton_step"]
        call.argtypes = [P, P, I32, I32]
        call(self.native.address, ctypes.byref(step), 0, len(self.native.ops) - 1)
        return self._results(arena, batch)

    def at_once(self, library: ctypes.CDLL, batch: Batch, pages: Tensor, blocks: int = 3) -> list[Tensor]:
        """The same by the megakernel."""
        step, arena = self.step(batch, pages)
        call = library["baton_megakernel"]
        call.argtypes = [P, P, P, I32]
        call(self.native.address, ctypes.byref(step), self._layers(library), blocks)
        return self._results(arena, batch)

    def _layers(self, library: ctypes.CDLL) -> int:
        found = library.library if hasattr(library, "library") else library
        size = ctypes.c_int64()
        found["baton_megakernel_layers"](P(self.native.address), None, ctypes.byref(size))
        held = torch.empty(size.value // 8, dtype=torch.int64)
        found["baton_megakernel_layers"](P(self.native.address), P(held.data_ptr()), ctypes.byref(size))
        self.keep.append(held)
        return held.data_ptr()

    def _results(self, arena: Tensor, batch: Batch) -> list[Tensor]:
        real = batch.rows - batch.padding
        return [self.native.register(arena, batch.rows, name)[:real].clone() for name in REGISTERS]


def agrees(case: Case, ops: ctypes.CDLL, mega: ctypes.CDLL, batch: Batch, steps: int = 3, blocks: int = 3) -> None:
    """``steps`` decodes one behind the other, both ways: registers and pages to the bit."""
    pages = case.pages()
    prompts = [(0, start) for start, _ in batch.items]
    if any(start for _, start in prompts):
        case.by_ops(ops, Batch(prompts), pages)
    mine = pages.clone()
    for number in range(steps):
        want = case.by_ops(ops, batch, pages)
        have = case.at_once(mega, batch, mine, blocks)
        for name, a, b in zip(REGISTERS, want, have, strict=True):
            assert torch.isfinite(a).all(), name
            assert torch.equal(a, b), (
                f"step {number}: {name} is {float((a - b).norm() / a.norm()):.1e} off the ops'"
            )
        assert torch.equal(pages, mine), f"step {number}: what lies in the pages is not the same"
        batch = batch.later()
