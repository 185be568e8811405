"""Measures what a prompt is made of, on the shapes of an 8B Llama: products of many rows, attention over pages.

Knows nothing of budgets or of how rows are shown. Beside cuBLAS in the same numbers where torch has them, and SDPA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.linear.packed import PackedWeight, pack_bf16, pack_e4m3, quantize
from bench.cuda import cases
from bench.cuda.cases import Part, peer
from bench.cuda.clock import Call, measure, variants
from bench.cuda.extent import used
from bench.cuda.ops import DeviceWeight, KvPool, Ops, item_table
from bench.cuda.paper import in_parts
from bench.cuda.right import NARROW, ROUNDED, judged
from bench.cuda.rows import Ceilings, Row, rated, versus
from bench.cuda.wanted import attention_error, product_error

MFU = 0.6  # of bf16, as the issue asks of a prompt
WITHOUT_PARTS = 1_000_000  # multiprocessors that no product's parts fill


def matrices(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """Measures products of more than 64 rows: by wgmma where it fills the device (linear/many/prefill.cuh), else by
    mma.sync; those that are split along K in one piece, too.
    """
    hidden, inner = used().shape.hidden, used().shape.inner
    for what, (n, k) in {"gate-up": (2 * inner, hidden), "down": (hidden, inner), "o": (hidden, hidden)}.items():
        plain = torch.randn(n, k) * k**-0.5
        kinds: dict[str, tuple[Callable[[], PackedWeight], Callable[[Tensor], Call]]] = {
            "bf16": (partial(pack_bf16, plain), partial(_blas_bf16, plain)),
            "int8": (partial(quantize, plain, 8, 0), partial(_blas_int8, plain)),
            "fp8 e4m3": (
                partial(pack_e4m3, plain.to(torch.float8_e4m3fn), torch.ones(n)),
                partial(_blas_fp8, plain),
            ),
            "int4 g128": (partial(quantize, plain, 4, min(128, k)), partial(_blas_bf16, plain)),
        }
        for kind, (pack, blas) in kinds.items():
            packed = pack()
            weight = DeviceWeight(packed)
            for m in used().prompts.m:
                xs = [torch.randn(m, k, device=used().device) for _ in range(variants(4 * m * k))]
                out = torch.empty(m, n, device=used().device)
                error = product_error(ops.linear(weight, xs[0], out), packed, xs[0], out)
                mine = measure([ops.linear(weight, x, out) for x in xs])
                goal = MFU if kind == "bf16" and m >= 2048 else None
                name = f"{what} {kind} M={m}"
                yield judged(rated("prompts", name, mine, 2.0 * m * n * k, "flops", top, goal), error, NARROW)
                yield judged(peer(name, mine, "cuBLAS", partial(_alone, blas, xs[0]), "prompts"), error, NARROW)
                if in_parts(n, m, kind.startswith("int4")):
                    with ops.rehearsal.dispatching(WITHOUT_PARTS):
                        whole = measure([ops.linear(weight, x, out) for x in xs])
                    yield judged(versus("prompts", name, mine, "skinny, in one piece", whole), error, NARROW)
                if what == "gate-up" and kind == "bf16":
                    yield from _gated(ops, packed, xs, plain, f"{what} with SwiGLU {kind} M={m}")


def _alone(make: Callable[[Tensor], Call], x: Tensor) -> list[Call]:
    return [make(x)]


def _gated(ops: Ops, packed: PackedWeight, xs: list[Tensor], plain: Tensor, name: str) -> Iterator[Row]:
    rows, weight = [x.bfloat16() for x in xs], DeviceWeight(packed)
    out = torch.empty(len(rows[0]), len(plain) // 2, dtype=torch.bfloat16, device=used().device)
    error = product_error(ops.linear(weight, rows[0], out, gated=True), packed, rows[0], out, gated=True)
    mine = measure([ops.linear(weight, x, out, gated=True) for x in rows])
    dense, compiled = plain.bfloat16().to(used().device), used().compile(_torch_gate)
    row = peer(name, mine, "cuBLAS and Triton", lambda: [partial(compiled, x, dense) for x in rows], "prompts")
    yield judged(row, error, NARROW)


def _torch_gate(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x @ weight.T).chunk(2, -1)
    return F.silu(gate) * up


def _blas_bf16(weight: Tensor, x: Tensor) -> Call:
    dense, rows = weight.bfloat16().to(used().device), x.bfloat16()
    return lambda: rows @ dense.T


def _blas_int8(weight: Tensor, x: Tensor) -> Call:
    dense, rows = ((t * 40).clamp(-127, 127).to(used().device, torch.int8) for t in (weight, x))
    return lambda: torch._int_mm(rows, dense.T)


def _blas_fp8(weight: Tensor, x: Tensor) -> Call:
    dense, rows = (t.to(used().device).to(torch.float8_e4m3fn) for t in (weight, x))
    one = torch.ones((), device=used().device)
    return lambda: torch._scaled_mm(rows, dense.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def attention(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """A whole prompt over its pages, causal, beside SDPA over contiguous rows; bf16 KV by both of our forms."""
    heads, kv_heads, dim = used().shape.heads, used().shape.kv_heads, used().shape.head_dim
    for dtype in cases.KV:
        for length in used().prompts.lengths:
            blocks = length // cases.PAGE
            pool = KvPool(blocks, dtype, kv_heads, dim)
            tables = torch.randperm(blocks, device=used().device).int().view(1, blocks)
            q = torch.randn(length, heads, dim, device=used().device)
            out = torch.empty_like(q)
            call = ops.prompt(pool, q, item_table(tables, [0], length), out)
            error = attention_error(call, pool, tables, [0], q, out)
            mine = measure([call])
            name = f"prompt attention {dtype} L={length}"
            work = 2.0 * heads * dim * length * (length + 1)
            yield judged(rated("prompts", name, mine, work, "flops", top), error, ROUNDED)
            if dtype == "bfloat16":
                by_mma = ops.prompt_by_mma(call)
                error = attention_error(by_mma, pool, tables, [0], q, out)
                yield judged(
                    peer(name, mine, "our mma.sync form", partial(_once, by_mma), "prompts"), error, ROUNDED
                )
                yield peer(name, mine, "torch SDPA, contiguous KV", partial(_sdpa, q, kv_heads), "prompts")


def _once(call: Call) -> list[Call]:
    return [call]


def _sdpa(q: Tensor, kv_heads: int) -> list[Call]:
    length, _, dim = q.shape
    rows = q.bfloat16().transpose(0, 1)[None].contiguous()
    keys, values = (
        torch.randn(1, kv_heads, length, dim, dtype=torch.bfloat16, device=used().device) for _ in range(2)
    )
    return [partial(F.scaled_dot_product_attention, rows, keys, values, is_causal=True, enable_gqa=True)]


def prompts(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """Measures what a prompt needs: attention first, because it takes less time, then the products."""
    yield from attention(ops, top)
    yield from matrices(ops, top)


PARTS: dict[str, Part] = {"prompts": prompts}
