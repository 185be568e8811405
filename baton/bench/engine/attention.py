"""Benchmarks paged attention of one decode step, as a share of the memory read rate measured in the same round.

Knows nothing of models. The pages of all layers are read one layer after another, as in a step, and together they
are larger than the caches. They lie on huge pages if the host gives a worker's memory those (docs/kv-memory.md).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from baton.bench.engine.memory import MemoryRead, seconds
from baton.bench.rows import Row, median, paired, spread
from baton.kernels.abi import native
from baton.kernels.paged_attention.native import Item, Pages, page_bytes, prepared
from baton.kernels.paged_attention.stored import ELEMENTS, PAGE, SCALED
from baton.kv.memory.host_pages import PageMemory

SHAPES = {"12/4 heads of 64": (12, 4, 64, 12), "32/8 heads of 128": (32, 8, 128, 8)}  # heads, kv_heads, dim, layers
CONTEXT = 4096  # tokens of KV of each sequence
TARGETS = {"bfloat16": 0.7, "int8": 0.7}


def rows(rounds: int, context: int = CONTEXT) -> Iterator[Row]:
    """Yields a row for each attention shape and KV dtype; its target is a share of the memory's read rate.

    ``context`` is the number of tokens attended to, ``rounds`` the number of measurements of each row.
    """
    memory = MemoryRead()
    for name, shape in SHAPES.items():
        for dtype in ELEMENTS:
            yield _row(f"attention, {name}, {context} tokens, {dtype} KV", memory, shape, dtype, rounds, context)


def _row(
    name: str, memory: MemoryRead, shape: tuple[int, int, int, int], dtype: str, rounds: int, context: int
) -> Row:
    heads, kv_heads, head_dim, layers = shape
    pages = random_pages(dtype, kv_heads, head_dim, layers, context)
    table = list(range(len(pages)))
    random.Random(0).shuffle(table)
    item: Item = (table, context - 1, 1)
    q, library = torch.randn(1, heads, head_dim), native.library()
    assert library is not None
    layer_calls = [
        prepared(library, q, Pages(pages, dtype, kv_heads, head_dim, layers, layer), [item], torch.empty_like(q))
        for layer in range(layers)
    ]
    rates, ceilings = [], []
    for _ in range(rounds + 1):
        ceilings.append(memory.rate())
        rates.append(pages.nbytes / seconds(lambda: [call() for call in layer_calls]))
    rates, ceilings = rates[1:], ceilings[1:]
    return Row(
        name,
        median(rates) / 1e9,
        "GB/s",
        peer=f"memory read, {median(ceilings) / 1e9:.3g} GB/s",
        ratio=paired(rates, ceilings),
        spread=spread(rates),
        target=TARGETS.get(dtype, 0.0),
    )


def random_pages(dtype: str, kv_heads: int, head_dim: int, layers: int, context: int) -> Tensor:
    """Returns random K and V of plausible magnitudes, (pages, page_bytes) uint8, in memory allocated as a
    worker's.
    """
    count, size = context // PAGE, page_bytes(dtype, kv_heads, head_dim, layers)
    memory = torch.frombuffer(PageMemory.create(count, size).view(), dtype=torch.uint8).view(count, size)
    planes = memory.view(count, layers * 2, -1)
    elements = PAGE * kv_heads * head_dim * ELEMENTS[dtype].itemsize
    for plane in planes.unbind(1):
        values = torch.randn(count, PAGE * kv_heads * head_dim)
        stored = (values * 30).clamp(-127, 127) if dtype in SCALED else values
        plane[:, :elements] = stored.to(ELEMENTS[dtype]).view(torch.uint8)
        if dtype in SCALED:
            plane[:, elements:] = torch.full((count, PAGE * kv_heads), 1 / 30).view(torch.uint8)
    return memory
