"""Says where and how large every measured call is: on a card at published sizes, or tiny on the CPU.

Knows nothing of what is measured. A part asks ``used()`` when it runs. Whoever wants other sizes runs it in
``using``; a process that is forked there has them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from baton.engine.backends.cuda.product_choice import Matrix
from baton.engine.backends.cuda.products import ROWS, USUAL

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a faster function of one on tensors, as ``torch.compile`` does."""


class Shape(msgspec.Struct, frozen=True):
    """Holds the dimensions of a dense Llama."""

    hidden: int
    inner: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


class OpSizes(msgspec.Struct, frozen=True):
    """Holds the sizes that ``cases`` measures."""

    rows: tuple[int, ...]  # of norm and gate
    decodes: tuple[tuple[int, int], ...]  # batch and context
    cascade: tuple[int, int, int]  # batch, prefix, keys of each sequence's own
    m: tuple[int, ...]  # rows of matrices
    tokens: int  # of pages that are packed
    ceilings: tuple[int, int]  # bytes of a copy, side of a product
    flex: tuple[int, int]  # the decode that flex attention is beside


class SmallSizes(msgspec.Struct, frozen=True):
    """Holds the sizes that ``small`` measures."""

    rows: tuple[int, ...]
    experts: dict[str, tuple[int, int, int, int]]  # by model: experts, chosen of them, hidden, inner
    expert_rows: tuple[int, ...]
    drafts: tuple[int, int, int]  # sequences, drafts of each, context


class PromptSizes(msgspec.Struct, frozen=True):
    """Holds the sizes that ``prompts`` measures."""

    m: tuple[int, ...]  # rows of matrices
    lengths: tuple[int, ...]  # of prompts, in tokens


class FormSizes(msgspec.Struct, frozen=True):
    """Holds the shapes at which ``shapes`` compares results."""

    m: tuple[int, ...]  # rows of products
    products: dict[str, tuple[int, int]]  # outputs and inputs of a matrix
    groups: tuple[int, ...]  # query heads per KV head
    decodes: tuple[tuple[int, int], ...]  # batch and context
    chunks: tuple[tuple[int, int], ...]  # rows of a chunk and the tokens before it


class MatrixSizes(msgspec.Struct, frozen=True):
    """Holds the bf16 matrices that ``products`` times, and by how many rows."""

    of: tuple[Matrix, ...]
    rows: tuple[int, ...]


class StepSizes(msgspec.Struct, frozen=True):
    """Holds the sizes of the whole steps that ``step`` measures."""

    shape: Shape
    length: int  # tokens of context of a decode
    chunk: int  # tokens of a prompt's chunk
    samples: int
    batches: tuple[int, ...]


class Extent(msgspec.Struct, frozen=True):
    """Holds everything that differs between a run on a card and a rehearsal."""

    device: str  # torch's name of where tensors lie
    past_l2: int  # bytes that no cache of the device holds
    compile: Compile
    shape: Shape
    ops: OpSizes
    small: SmallSizes
    prompts: PromptSizes
    forms: FormSizes
    matrices: MatrixSizes
    step: StepSizes


LLAMA_8B = Shape(hidden=4096, inner=14336, vocab=128_256, heads=32, kv_heads=8, head_dim=128, layers=32)
ON_CARD = Extent(
    device="cuda",
    past_l2=256 << 20,
    compile=torch.compile,
    shape=LLAMA_8B,
    ops=OpSizes(
        rows=(32, 8192),
        decodes=((1, 512), (64, 512), (1, 8192), (16, 2048), (64, 2048), (64, 8192)),
        cascade=(256, 32_768, 64),
        m=(1, 8, 16, 32, 64),
        tokens=2048,
        ceilings=(2 << 30, 8192),
        flex=(64, 2048),
    ),
    small=SmallSizes(
        rows=(64, 2048),
        experts={"Mixtral 8x7B": (8, 2, 4096, 14336), "Qwen3 30B-A3B": (128, 8, 2048, 768)},
        expert_rows=(1, 32, 512),
        drafts=(64, 4, 2048),
    ),
    prompts=PromptSizes(m=(128, 512, 2048, 8192), lengths=(2048, 8192)),
    forms=FormSizes(
        m=(1, 8, 33, 64, 65, 128, 256, 512, 2048),
        products={
            "qkv": (6144, 4096), "o": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336),
            "N 8192": (8192, 4096),
        },
        groups=(1, 4, 8),
        decodes=((1, 1), (3, 1000), (64, 2048), (5, 32_768), (1, 65_537), (300, 257)),
        chunks=((128, 0), (512, 777), (2048, 0), (2048, 6144)),
    ),
    matrices=MatrixSizes(of=USUAL, rows=ROWS),
    step=StepSizes(shape=LLAMA_8B, length=2048, chunk=2048, samples=12, batches=(1, 8, 32)),
)  # fmt: skip
_used = ON_CARD


def used() -> Extent:
    """Returns where and how large this process measures now."""
    return _used


@contextmanager
def using(extent: Extent) -> Iterator[None]:
    """Makes every part measure at ``extent`` inside of the ``with``; it must not be open in two threads."""
    global _used
    before, _used = _used, extent
    try:
        yield
    finally:
        _used = before
