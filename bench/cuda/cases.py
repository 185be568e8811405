"""Each op on the shapes of an 8B Llama, beside what torch, cuBLAS and Triton (torch.compile) do on the same inputs.

Knows nothing of budgets or of how rows are shown. A part yields its rows one by one; what can't be had yields a row
that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from xxhash import xxh3_64_intdigest

from baton.kernels.linear.packed import PackedWeight, pack_bf16, quantize
from baton.kernels.linear.packed_floats import pack_f32, unpack_f32
from baton.kernels.swiglu.reference import swiglu
from bench.cuda import clock
from bench.cuda.clock import Call, measure, variants
from bench.cuda.extent import used
from bench.cuda.ops import DeviceWeight, KvPool, Ops, greedy, item_table
from bench.cuda.right import EXACT, FLOAT, NARROW, ROUNDED, error_of, judged
from bench.cuda.rows import Ceilings, Row, Sample, absent, rated, versus
from bench.cuda.wanted import attention_error, choice_error, exact, product_error

KV = ("bfloat16", "int8", "fp8_e4m3")
PAGE = 16
Part = Callable[[Ops, Ceilings], Iterator[Row]]


def ceilings() -> tuple[Ceilings, list[Row]]:
    """Measures how fast this card reads, copies and multiplies; returns these ceilings and their rows."""
    size, side = used().ops.ceilings
    source, to = (torch.zeros(size // 4, dtype=torch.float32, device=used().device) for _ in range(2))
    read = [measure([lambda: source.sum()]), measure([lambda: source.view(torch.int32).amax()])]
    copy = measure([lambda: to.copy_(source)])
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=used().device) for _ in range(2))
    gemm = measure([lambda: a @ b])
    best = min(read, key=lambda sample: sample.median)
    found = Ceilings(size / best.median, 2 * size / copy.median, 2 * side**3 / gemm.median)
    rows = [
        Row(part="ceilings", name="pure read", value=round(found.read / 1e9, 1), unit="GB/s", spread=best.spread),
        Row(part="ceilings", name="device copy", value=round(found.copy / 1e9, 1), unit="GB/s", spread=copy.spread),
        Row(
            part="ceilings",
            name=f"bf16 GEMM {side}",
            value=round(found.flops / 1e12, 1),
            unit="TFLOP/s",
            spread=gemm.spread,
        ),
    ]
    return found, rows


def each(function: Callable[..., object], inputs: Iterable[Iterable[Any]]) -> list[Call]:
    """A call of ``function`` on each of ``inputs``."""
    return [partial(function, *given) for given in inputs]


def peer(
    name: str, mine: Sample, other: str, make: Callable[[], list[Call]], part: str, target: float | None = None
) -> Row:
    """Measures beside a peer that may not be here."""
    try:
        return versus(part, name, mine, other, measure(make()), target)
    except Exception as error:  # a peer's absence is a row, whatever it raises
        clock.wait()
        return absent(part, f"{name} beside {other}", f"{type(error).__name__}: {error}")


def rows_ops(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """Norm, SwiGLU, rope and append."""
    hidden, inner_size = used().shape.hidden, used().shape.inner
    for count in used().ops.rows:
        nbytes = 16 * count * hidden
        sets = [
            (
                *(torch.randn(count, hidden, device=used().device) for _ in range(2)),
                torch.ones(hidden, device=used().device),
            )
            for _ in range(variants(nbytes))
        ]
        out = torch.empty(count, hidden, device=used().device)
        name = f"residual + RMSNorm T={count}"

        def torchs(x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x.add_(delta), (hidden,), weight, 1e-5)

        wanted, copied = torchs(sets[0][0].clone(), *sets[0][1:]), sets[0][0].clone()
        call = ops.rms_norm(copied, sets[0][1], sets[0][2], out)
        error = error_of(call, out, lambda wanted=wanted: wanted)  # type: ignore[misc]
        mine = measure([ops.rms_norm(x, delta, weight, out) for x, delta, weight in sets])
        yield judged(rated("rows", name, mine, nbytes, "copy", top), error, FLOAT)
        compiled = used().compile(torchs)
        yield peer(name, mine, "torch", partial(each, torchs, sets), "rows")
        yield peer(name, mine, "Triton", partial(each, compiled, sets), "rows")
    count = used().ops.rows[-1]
    gates = [torch.randn(count, 2 * inner_size, device=used().device) for _ in range(2)]
    inner = torch.empty(count, inner_size, device=used().device)
    error = error_of(ops.swiglu(gates[0], inner), inner, lambda: swiglu(gates[0]))
    mine = measure([ops.swiglu(g, inner) for g in gates])
    yield judged(rated("rows", f"SwiGLU T={count}", mine, 12 * count * inner_size, "copy", top), error, FLOAT)


def attention(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """Decode over paged KV, one layer."""
    for dtype in KV:
        for batch, length in used().ops.decodes:
            yield from _decode(ops, top, dtype, batch, length)


def _decode(ops: Ops, top: Ceilings, dtype: str, batch: int, length: int) -> Iterator[Row]:
    heads, kv_heads, dim = used().shape.heads, used().shape.kv_heads, used().shape.head_dim
    blocks = length // PAGE
    one = KvPool(1, dtype, kv_heads, dim).page_bytes * blocks * batch
    sets = variants(one)
    pool = KvPool(blocks * batch * sets, dtype, kv_heads, dim)
    order = torch.randperm(blocks * batch * sets, device=used().device).int().view(sets, batch, blocks)
    q = torch.randn(batch, heads, dim, device=used().device)
    out = torch.empty_like(q)
    calls = [ops.attention(pool, q, item_table(order[at], [length - 1] * batch), out) for at in range(sets)]
    error = attention_error(calls[0], pool, order[0], [length - 1] * batch, q, out)
    name = f"decode attention {dtype} B={batch} L={length}"
    mine = measure(calls)
    target = 0.85 if one >= 100e6 else 0.65 if length == 512 and batch >= 64 else None
    yield judged(rated("attention", name, mine, one, "read", top, target), error, ROUNDED)
    if dtype != "bfloat16":
        return

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (
            torch.randn(batch, kv_heads, length, dim, dtype=torch.bfloat16, device=used().device) for _ in range(2)
        )
        return q.bfloat16().view(batch, heads, 1, dim), keys, values

    def sdpa() -> list[Call]:
        return each(partial(F.scaled_dot_product_attention, enable_gqa=True), [inputs() for _ in range(sets)])

    def flex() -> list[Call]:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = partial(used().compile(flex_attention), enable_gqa=True)
        return each(compiled, [inputs() for _ in range(sets)])

    yield peer(name, mine, "torch SDPA, contiguous KV", sdpa, "attention")
    if (batch, length) == used().ops.flex:
        yield peer(name, mine, "torch flex_attention, contiguous KV", flex, "attention")


def cascade(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """A prefix that all share, read once, beside each reading it for itself."""
    heads, dim = used().shape.heads, used().shape.head_dim
    batch, prefix, own = used().ops.cascade
    shared, each = prefix // PAGE, own // PAGE
    pool = KvPool(shared + batch * each, "bfloat16", used().shape.kv_heads, dim)
    tables = torch.empty(batch, shared + each, dtype=torch.int32, device=used().device)
    tables[:, :shared] = torch.arange(shared, device=used().device)
    tables[:, shared:] = shared + torch.arange(batch * each, device=used().device).view(batch, each)
    q = torch.randn(batch, heads, dim, device=used().device)
    out = torch.empty_like(q)
    items = item_table(tables, [prefix + own - 1] * batch)
    groups = torch.tensor([0, batch, prefix], dtype=torch.int32, device=used().device)
    flat = measure([ops.attention(pool, q, items, out)], samples=6)
    call = ops.cascade(pool, q, items, groups, out)
    error = attention_error(call, pool, tables, [prefix + own - 1] * batch, q, out)
    mine = measure([call])
    name = f"cascade attention P={prefix} B={batch}"
    yield judged(versus("cascade", name, mine, "flat paged attention", flat, 15.0), error, ROUNDED)
    pairs = batch * (prefix + own)
    products = rated("cascade", f"{name}, its products", mine, 4.0 * heads * dim * pairs, "flops", top)
    yield judged(products, error, ROUNDED)


def matrices(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """Weight-only products at decode's sizes, beside cuBLAS in bf16."""
    hidden, inner = used().shape.hidden, used().shape.inner
    for what, (n, k) in {"gate-up": (2 * inner, hidden), "down": (hidden, inner), "o": (hidden, hidden)}.items():
        plain = torch.randn(n, k) * k**-0.5
        kinds: dict[str, Callable[[], PackedWeight]] = {
            "bf16": partial(pack_bf16, plain),
            "int8": partial(quantize, plain, 8, 0),
            "int4 g128": partial(quantize, plain, 4, min(128, k)),
        }
        sets = variants(n * k / 2)
        dense = [plain.bfloat16().to(used().device) for _ in range(variants(n * k * 2))]
        blas = {}
        for m in used().ops.m:
            x = torch.randn(m, k, device=used().device, dtype=torch.bfloat16)
            blas[m] = measure([partial(torch.matmul, x, w.T) for w in dense])
        for kind, pack in kinds.items():
            packed = pack()
            weights = [
                DeviceWeight(packed) for _ in range(variants(packed.nbytes) if kind != "int4 g128" else sets)
            ]
            for m in used().ops.m:
                x, out = torch.randn(m, k, device=used().device), torch.empty(m, n, device=used().device)
                error = product_error(ops.dense(weights[0], x, out), packed, x, out)
                mine = measure([ops.dense(weight, x, out) for weight in weights])
                goal = 0.8 if kind != "bf16" and n * k > 50e6 and m <= 16 else None
                row = rated("linear", f"{what} {kind} M={m}", mine, packed.nbytes, "read", top, goal)
                yield judged(row, error, NARROW)
                goal = 3.3 if kind == "int4 g128" and m <= 32 and what == "gate-up" else None
                row = versus("linear", f"{what} {kind} M={m} beside cuBLAS", mine, "cuBLAS bf16", blas[m], goal)
                yield judged(row, error, NARROW)
            del weights
    small = pack_f32(torch.randn(1024, 1024))
    x, out = torch.randn(32, 1024, device=used().device), torch.empty(32, 1024, device=used().device)
    call = ops.dense(DeviceWeight(small), x, out)
    error = error_of(call, out, lambda: x.cpu() @ unpack_f32(small).T)
    row = rated("linear", "float32 1024 M=32", measure([call] * 2), small.nbytes, "read", top)
    yield judged(row, error, FLOAT)


def head(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """The projection to the vocabulary and the choice, logits never in memory."""
    vocab, hidden = used().shape.vocab, used().shape.hidden
    plain = torch.randn(vocab, hidden) * hidden**-0.5
    dense = plain.bfloat16().to(used().device)
    for kind, packed in {"bf16": pack_bf16(plain), "int8": quantize(plain, 8, 0)}.items():
        weight = DeviceWeight(packed)
        for rows, temperature in ((1, 0.0), (32, 0.0), (32, 0.8)):
            x = torch.randn(rows, hidden, device=used().device)
            choices = greedy(rows, temperature)
            error = choice_error(ops.head(weight, x, choices), packed, x, choices, temperature)
            mine = measure([ops.head(weight, x, choices)])
            name = f"LM head + {'draw' if temperature else 'argmax'} {kind} B={rows}"
            yield judged(rated("head", name, mine, packed.nbytes, "read", top, 0.88), error, ROUNDED)
            if kind == "bf16":
                other = _torch_draw if temperature else _torch_likeliest
                yield peer(name, mine, "cuBLAS and torch", partial(each, other, [(x.bfloat16(), dense)]), "head")


def _torch_likeliest(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight.T).argmax(-1)


def _torch_draw(x: Tensor, weight: Tensor) -> Tensor:
    shares = torch.softmax((x @ weight.T).float() / 0.8, -1)
    return shares.div_(torch.empty_like(shares).exponential_()).argmax(-1)


def kv(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """Pages of 2k tokens packed for the wire and scattered, hashed on the way, all layers in one launch."""
    shape = used().shape
    size, count = 2 * shape.layers * PAGE * shape.kv_heads * shape.head_dim * 2, used().ops.tokens // PAGE
    pool, wire = (
        torch.randint(0, 64, (2 * count, size), dtype=torch.uint8, device=used().device) for _ in range(2)
    )
    sums = torch.empty(count, dtype=torch.int64, device=used().device)

    def addresses(memory: Tensor, order: Tensor) -> Tensor:
        return memory.data_ptr() + order.to(used().device, torch.int64) * size

    scattered, straight = torch.randperm(2 * count)[:count], torch.arange(count)
    for name, to, source, (into, filled), (read, taken) in (
        (
            "pack 2k tokens",
            addresses(wire, straight),
            addresses(pool, scattered),
            (wire, straight),
            (pool, scattered),
        ),
        (
            "scatter 2k tokens",
            addresses(pool, scattered),
            addresses(wire, straight),
            (pool, scattered),
            (wire, straight),
        ),
    ):
        into.fill_(0xEE)
        call = ops.kv_copy(to, source, size, sums)
        call()
        clock.wait()
        error = exact(lambda: into[filled], lambda: read[taken])  # noqa: B023
        hashed = [xxh3_64_intdigest(read[int(at)].cpu().numpy().tobytes()) for at in taken[:2]]
        error += sums[:2].cpu().numpy().view(np.uint64).tolist() != hashed
        mine = measure([call])
        yield judged(rated("kv", f"{name}, hashed", mine, 2.0 * size * count, "copy", top, 0.85), error, EXACT)


PARTS: dict[str, Part] = {
    "rows": rows_ops,
    "attention": attention,
    "cascade": cascade,
    "linear": matrices,
    "head": head,
    "kv": kv,
}
