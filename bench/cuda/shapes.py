"""Ops at the shapes that a model of 8B has, and at the edges of what dispatch decides by the card: results alone.

Knows no clock. A suite's small shapes never fill 132 multiprocessors, so that dispatch takes other kernels there
than for prompts; here the shapes are the served ones. Every result is compared, computed twenty times (a hundred by
$BATON_GPU_REPEATS) into poisoned outputs, and has to have the same bits each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kernels.cuda import build
from baton.kernels.linear.packed import PackedWeight, pack_bf16, pack_e4m3, quantize
from bench.cuda import cases, clock
from bench.cuda.clock import Call
from bench.cuda.ops import DeviceWeight, KvPool, Ops, item_table
from bench.cuda.right import NARROW, ROUNDED, poison
from bench.cuda.rows import Row
from bench.cuda.wanted import attention_error, product_error

REPEATS_ENV = "BATON_GPU_REPEATS"
# Rows of products; outputs and inputs of an 8B's four; query heads per KV head; decodes' batch and context; a
# chunk's rows and the tokens before it.
SIZES: dict[str, Any] = {
    "m": (1, 8, 33, 64, 65, 128, 256, 512, 2048),
    "products": {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336),
        "N 8192": (8192, 4096),
    },
    "groups": (1, 4, 8),
    "decodes": ((1, 1), (3, 1000), (64, 2048), (5, 32_768), (1, 65_537), (300, 257)),
    "chunks": ((128, 0), (512, 777), (2048, 0), (2048, 6144)),
}  # fmt: skip
FORMS: dict[str, Callable[[Tensor], PackedWeight]] = {
    "bf16": pack_bf16,
    "int8": partial(quantize, bits=8, group=0),
    "int4 g128": lambda plain: quantize(plain, 4, min(128, plain.shape[1])),
    "fp8 e4m3": lambda plain: pack_e4m3(plain.to(torch.float8_e4m3fn), torch.ones(len(plain))),
}


def repeats() -> int:
    """Returns how often a result is computed again, which finds races that one run misses."""
    return int(os.environ.get(REPEATS_ENV, "20" if clock.DEVICE == "cuda" else "2"))


def products(ops: Ops, form: str, name: str) -> Iterator[Row]:
    """One matrix in one form, over all numbers of rows."""
    n, k = SIZES["products"][name]
    packed = FORMS[form](torch.randn(n, k) * k**-0.5)
    weight = DeviceWeight(packed)
    for m in SIZES["m"]:
        x = torch.randn(m, k, device=clock.DEVICE)
        out = torch.empty(m, n, device=clock.DEVICE)
        call = ops.linear(weight, x, out)
        error = product_error(call, packed, x, out)
        yield told(f"{name} {form} M={m}", "linear", error, NARROW, differing(call, out))


def decodes(ops: Ops, dtype: str, group: int) -> Iterator[Row]:
    """Sequences of a token each behind contexts, also beyond what slots hold at once."""
    for batch, length in SIZES["decodes"]:
        yield _attention(ops, dtype, group, batch, 1, length)


def chunks(ops: Ops, dtype: str, group: int) -> Iterator[Row]:
    """Prompts' chunks, alone and behind others."""
    for count, before in SIZES["chunks"]:
        yield _attention(ops, dtype, group, 1, count, before)


def _attention(ops: Ops, dtype: str, group: int, batch: int, queries: int, before: int) -> Row:
    kv_heads, dim = cases.KV_HEADS, cases.HEAD_DIM
    blocks = -(-(before + queries) // cases.PAGE)
    pool = KvPool(blocks * batch, dtype, kv_heads, dim)
    tables = torch.randperm(blocks * batch, device=clock.DEVICE).int().view(batch, blocks)
    q = torch.randn(batch * queries, kv_heads * group, dim, device=clock.DEVICE)
    out, starts = torch.empty_like(q), [before] * batch
    call = ops.attention(pool, q, item_table(tables, starts, queries), out)
    error = attention_error(call, pool, tables, starts, q, out)
    what = f"decode B={batch}" if queries == 1 else f"chunk of {queries}"
    name = f"attention {dtype} GQA {group} {what} behind {before}"
    return told(name, "paged_attention", error, ROUNDED, differing(call, out))


def differing(call: Call, out: Tensor) -> int:
    """Returns how many of the repeats had other bits than the first."""
    first, found = out.clone(), 0
    for _ in range(repeats()):
        poison(out)
        call()
        clock.wait()
        found += not torch.equal(out, first)
    return found


def told(name: str, op: str, error: float, most: float, other: int) -> Row:
    """Returns a row of 1 where the result is right and always the same; ``against`` names the sources of ``op``."""
    said = [f"off by {error:.1e}, at most {most:.0e}"] if not error <= most else []
    said += [f"{other} of {repeats()} repeats had other bits"] if other else []
    passed, key = float(not said), build.source_key(op)
    return Row(
        part="shapes", name=name, value=passed, unit="passed", against=key, said="; ".join(said), error=error
    )


def names() -> list[str]:
    """Returns the names of ``parts``."""
    attention = [f"{kind} {dtype} GQA {group}" for dtype in cases.KV for group in SIZES["groups"] for kind in KINDS]
    return [f"{name} {form}" for form in FORMS for name in SIZES["products"]] + attention


def parts(ops: Ops) -> Sequence[tuple[str, Callable[[], Iterator[Row]]]]:
    """Returns what runs in a process each, by name."""
    found: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        (f"{name} {form}", partial(products, ops, form, name)) for form in FORMS for name in SIZES["products"]
    ]
    for dtype in cases.KV:
        for group in SIZES["groups"]:
            found += [
                (f"{kind} {dtype} GQA {group}", partial(make, ops, dtype, group)) for kind, make in KINDS.items()
            ]
    return found


KINDS = {"decodes": decodes, "chunks": chunks}
