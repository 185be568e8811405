"""Ops at the shapes that a model of 8B has, and at the edges of what dispatch decides by the card: results alone.

Knows no clock. A suite's small shapes never fill 132 multiprocessors, so that dispatch takes other kernels there
than for prompts; here the shapes are the served ones. Every result is compared, computed a hundred times (or
$BATON_GPU_REPEATS) into poisoned outputs, and has to have the same bits each time. Products of more than 64 rows
are computed by each kernel that takes them on whatever card, too, by the number of multiprocessors that dispatch is
told. Whether these have the bits of the card's own choice is a row of its own: it is not promised of each form.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from baton.kernels.cuda import build, table
from baton.kernels.linear.packed import PackedWeight, pack_bf16, pack_e4m3, quantize
from bench.cuda import cases, clock
from bench.cuda.clock import Call
from bench.cuda.extent import used
from bench.cuda.ops import PROMPT_QUERIES, DeviceWeight, KvPool, Ops, item_table
from bench.cuda.paper import MANY, WIDE
from bench.cuda.right import NARROW, ROUNDED, poison
from bench.cuda.rows import Row
from bench.cuda.wanted import attention_error, product_rows, rows_error

REPEATS_ENV = "BATON_GPU_REPEATS"
FORMS: dict[str, Callable[[Tensor], PackedWeight]] = {
    "bf16": pack_bf16,
    "int8": partial(quantize, bits=8, group=0),
    "int4 g128": lambda plain: quantize(plain, 4, min(128, plain.shape[1])),
    "fp8 e4m3": lambda plain: pack_e4m3(plain.to(torch.float8_e4m3fn), torch.ones(len(plain))),
}


def repeats() -> int:
    """Returns how often a result is computed again, which finds races that one run misses."""
    return int(os.environ.get(REPEATS_ENV, "100" if used().device == "cuda" else "2"))


def products(ops: Ops, form: str, name: str) -> Iterator[Row]:
    """One matrix in one form, over all numbers of rows and by every kernel."""
    n, k = used().forms.products[name]
    packed = FORMS[form](torch.randn(n, k) * k**-0.5)
    weight = DeviceWeight(packed)
    for m in used().forms.m:
        x = torch.randn(m, k, device=used().device)
        out = torch.empty(m, n, device=used().device)
        call, wanted = ops.linear(weight, x, out), product_rows(packed, x)
        yield _product(ops, f"{name} {form} M={m}", call, wanted, out)
        own = out.clone()
        for way, count in ways(form, n, m).items():
            with ops.rehearsal.dispatching(count):
                yield _product(ops, f"{name} {form} M={m} by {way}", call, wanted, out)
            yield _beside(f"{name} {form} M={m} by {way}", out, own)


def _product(ops: Ops, name: str, call: Call, wanted: Tensor, out: Tensor) -> Row:
    ops.rehearsal.note()
    error = rows_error(call, wanted, out)
    other = differing(call, out)
    kernels = table.of_op(ops.rehearsal.launched(), "linear")
    return told(name, "linear", error, NARROW, other, kernels)


def _beside(name: str, out: Tensor, own: Tensor) -> Row:
    """Says how many elements have other bits than by the kernel that the card's own number takes."""
    count = float((out != own).sum())
    return Row(part="bits", name=name, value=count, unit=f"of {out.numel()}", against=build.source_key("linear"))


def ways(form: str, n: int, m: int) -> dict[str, int]:
    """Returns, by the kernel that dispatch then takes for ``n`` outputs and ``m`` rows (linear/cuda.cu), a number
    of multiprocessors; none where there is one kernel for all of them.
    """
    if m <= 64:
        return {}
    int4 = form.startswith("int4")
    tiles = (WIDE if int4 else MANY).blocks(n, m)
    found = {f"{count} parts": tiles * count + int4 for count in (8, 4, 2)}  # 128 x 128 tiles do with twice as many
    if int4:
        return {**found, "wide": tiles, "skinny": 1_000_000}
    return {**found, "prefill": 1, "wide": max(3, -(-3 * tiles // 2)), "skinny": 1_000_000}


def decodes(ops: Ops, dtype: str, group: int) -> Iterator[Row]:
    """Sequences of a token each behind contexts, also beyond what slots hold at once."""
    for batch, length in used().forms.decodes:
        yield _attention(ops, dtype, group, batch, 1, length)


def chunks(ops: Ops, dtype: str, group: int) -> Iterator[Row]:
    """Prompts' chunks, alone and behind others."""
    for count, before in used().forms.chunks:
        yield _attention(ops, dtype, group, 1, count, before)
        if count >= PROMPT_QUERIES:
            yield _attention(ops, dtype, group, 1, count, before, "prompt_attention")
            if dtype == "bfloat16":
                yield _attention(ops, dtype, group, 1, count, before, "prompt_attention", by_mma=True)


def _attention(
    ops: Ops,
    dtype: str,
    group: int,
    batch: int,
    queries: int,
    before: int,
    op: str = "paged_attention",
    by_mma: bool = False,
) -> Row:
    kv_heads, dim = used().shape.kv_heads, used().shape.head_dim
    blocks = -(-(before + queries) // cases.PAGE)
    pool = KvPool(blocks * batch, dtype, kv_heads, dim)
    tables = torch.randperm(blocks * batch, device=used().device).int().view(batch, blocks)
    q = torch.randn(batch * queries, kv_heads * group, dim, device=used().device)
    out, starts = torch.empty_like(q), [before] * batch
    call = (ops.prompt if op == "prompt_attention" else ops.attention)(
        pool, q, item_table(tables, starts, queries), out
    )
    call = ops.prompt_by_mma(call) if by_mma else call
    error = attention_error(call, pool, tables, starts, q, out)
    what = f"decode B={batch}" if queries == 1 else f"chunk of {queries}"
    way = " by mma.sync" if by_mma else ""
    name = f"{op.replace('paged_', '').replace('_', ' ')} {dtype} GQA {group} {what} behind {before}{way}"
    ops.rehearsal.note()
    other = differing(call, out)
    kernels = table.of_op(ops.rehearsal.launched(), op)
    return told(name, op, error, ROUNDED, other, kernels)


def differing(call: Call, out: Tensor) -> int:
    """Returns how many of the repeats had other bits than the first."""
    first, found = out.clone(), 0
    for _ in range(repeats()):
        poison(out)
        call()
        clock.wait()
        found += not torch.equal(out, first)
    return found


def told(name: str, op: str, error: float, most: float, other: int, kernels: Sequence[str]) -> Row:
    """Returns a row of 1 where the result is right and always the same; ``against`` names the sources of ``op``,
    ``launched`` its ``kernels`` that computed it.
    """
    said = [f"off by {error:.1e}, at most {most:.0e}"] if not error <= most else []
    said += [f"{other} of {repeats()} repeats had other bits"] if other else []
    return Row(
        part="shapes",
        name=name,
        value=float(not said),
        unit="passed",
        against=build.source_key(op),
        said="; ".join(said),
        error=error,
        launched=tuple(kernels),
    )


def names() -> list[str]:
    """Returns the names of ``parts``."""
    attention = [
        f"{kind} {dtype} GQA {group}" for dtype in cases.KV for group in used().forms.groups for kind in KINDS
    ]
    return [f"{name} {form}" for form in FORMS for name in used().forms.products] + attention


def parts(ops: Ops) -> Sequence[tuple[str, Callable[[], Iterator[Row]]]]:
    """Returns what runs in a process each, by name."""
    found: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        (f"{name} {form}", partial(products, ops, form, name)) for form in FORMS for name in used().forms.products
    ]
    for dtype in cases.KV:
        for group in used().forms.groups:
            found += [
                (f"{kind} {dtype} GQA {group}", partial(make, ops, dtype, group)) for kind, make in KINDS.items()
            ]
    return found


KINDS = {"decodes": decodes, "chunks": chunks}
