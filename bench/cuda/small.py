"""Small ops, experts and drafts on the shapes of published models, beside torch, cuBLAS and Triton (torch.compile).

Knows nothing of budgets or of how rows are shown. A part yields its rows one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.moe.native import Experts
from baton.kernels.paged_attention.stored import quantized, read_layer
from baton.kernels.rms_norm.reference import rms_norm
from bench.cuda import cases, clock
from bench.cuda.cases import Part, each, peer
from bench.cuda.clock import Call, measure, variants
from bench.cuda.extent import used
from bench.cuda.ops import KvPool, Ops, draft_table, item_table
from bench.cuda.right import EXACT, NARROW, ROUNDED, error_of, judged, off
from bench.cuda.rows import Ceilings, Row, rated, versus
from bench.cuda.wanted import accept_error, attention_error

VERIFY_TARGET = 1 / 1.1  # a verify of K=4 takes at most 1.1 decode steps


def small(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """Embedding, rope with append, and the norm that rounds for the product behind it."""
    hidden = used().shape.hidden
    table = torch.randn(used().shape.vocab, hidden, device=used().device).bfloat16()
    for count in used().small.rows:
        drawn = [torch.randint(0, used().shape.vocab, (count,), device=used().device) for _ in range(4)]
        out = torch.empty(count, hidden, device=used().device)
        error = error_of(ops.embedding(drawn[0].int(), table, out), out, lambda: _embedded(drawn[0], table))  # noqa: B023
        mine = measure([ops.embedding(tokens.int(), table, out) for tokens in drawn])
        name = f"embedding T={count}"
        yield judged(rated("small", name, mine, 6.0 * count * hidden, "copy", top), error, EXACT)
        yield peer(name, mine, "torch", partial(each, _embedded, [(tokens, table) for tokens in drawn]), "small")
        yield from _rope(ops, top, count)
        for rounding, (kind, size) in {1: (torch.int8, 1), 3: (torch.bfloat16, 2)}.items():
            sets = [
                tuple(torch.randn(count, hidden, device=used().device) for _ in range(2))
                for _ in range(variants(16 * count * hidden))
            ]
            weight, scales = torch.ones(hidden, device=used().device), torch.empty(count, device=used().device)
            rounded = torch.empty(count, hidden, dtype=kind, device=used().device)
            wanted, copied = rms_norm(sets[0][0], sets[0][1], weight, 1e-5)[1], sets[0][0].clone()
            call = ops.rounded_norm(copied, sets[0][1], weight, rounding, rounded, scales)
            by = (lambda: rounded.float() * scales[:, None]) if kind == torch.int8 else rounded.float  # noqa: B023
            error = _after(call, by, wanted)
            took = measure([ops.rounded_norm(x, d, weight, rounding, rounded, scales) for x, d in sets])
            name = f"residual + RMSNorm to {str(kind).removeprefix('torch.')} T={count}"
            yield judged(rated("small", name, took, (12.0 + size) * count * hidden, "copy", top), error, ROUNDED)


def _rope(ops: Ops, top: Ceilings, count: int) -> Iterator[Row]:
    heads, kv_heads, dim = used().shape.heads, used().shape.kv_heads, used().shape.head_dim
    blocks = -(-count // cases.PAGE)
    angles = torch.randn(count, dim, device=used().device)
    for dtype in cases.KV:
        pool = KvPool(blocks, dtype, kv_heads, dim)
        tables = torch.randperm(blocks, device=used().device).int().view(1, blocks)
        qkv = [
            torch.randn(count, heads + 2 * kv_heads, dim, device=used().device)
            for _ in range(variants(4 * count * heads * dim))
        ]
        items = item_table(tables, [0], count)
        error = _append_error(ops, pool, qkv[0].clone(), items, angles, tables)
        mine = measure([ops.append(pool, each, items, angles) for each in qkv])
        read, written = 4.0 * (heads + 2 * kv_heads) * dim, 4.0 * heads * dim + pool.page_bytes / cases.PAGE
        name = f"rope + append {dtype} T={count}"
        yield judged(rated("small", name, mine, count * (read + written), "copy", top), error, ROUNDED)
        if dtype != "bfloat16":
            continue
        store = torch.empty(2, blocks * cases.PAGE, kv_heads, dim, dtype=torch.bfloat16, device=used().device)
        slots = torch.randperm(blocks * cases.PAGE, device=used().device)[:count]
        compiled = used().compile(_torch_rope)
        call = partial(_calls, compiled, qkv, angles, store, slots, heads)
        yield peer(name, mine, "Triton", call, "small")


def _after(call: Call, found: Callable[[], Tensor], wanted: Tensor) -> float:
    """Runs ``call`` and returns how far its result is from ``wanted``."""
    call()
    clock.wait()
    return off(found(), wanted)


def _append_error(ops: Ops, pool: KvPool, qkv: Tensor, items: Tensor, angles: Tensor, tables: Tensor) -> float:
    """The worst of the rotated queries, the stored keys and the stored values."""
    given, kv_heads = qkv.clone().cpu(), pool.kv_heads
    heads = qkv.shape[1] - 2 * kv_heads
    ops.append(pool, qkv, items, angles)()
    clock.wait()
    cos, sin = (half[:, None] for half in angles.cpu().chunk(2, -1))
    low, high = given[:, : heads + kv_heads].chunk(2, -1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    memory = pool.memory[tables[0].long()].cpu()
    kv = read_layer(memory, torch.arange(len(memory)), 0, 1, kv_heads, pool.head_dim, pool.dtype)
    keys, values = (quantized(rows, pool.dtype) for rows in (rotated[:, heads:], given[:, heads + kv_heads :]))
    pairs = (qkv[:, :heads].cpu(), rotated[:, :heads]), (kv[0][: len(given)], keys), (kv[1][: len(given)], values)
    return max(off(found, wanted) for found, wanted in pairs)


def _calls(
    function: Any, qkv: list[Tensor], angles: Tensor, store: Tensor, slots: Tensor, heads: int
) -> list[Call]:
    return [partial(function, each, angles, store, slots, heads) for each in qkv]


def _torch_rope(qkv: Tensor, angles: Tensor, store: Tensor, slots: Tensor, heads: int) -> Tensor:
    kv_heads = store.shape[2]
    cos, sin = (half[:, None] for half in angles.chunk(2, -1))
    low, high = qkv[:, : heads + kv_heads].chunk(2, -1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    store[0, slots] = rotated[:, heads:].bfloat16()
    store[1, slots] = qkv[:, heads + kv_heads :].bfloat16()
    return rotated[:, :heads]


def experts(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """A layer of experts: the weights of those that any row chose, read once, are the floor."""
    for name, (count, chosen, hidden, inner) in used().small.experts.items():
        up, down = (
            torch.randint(0, 64, shape, dtype=torch.uint8, device=used().device).view(torch.bfloat16)
            for shape in ((count, 2 * inner, 2 * hidden), (count, hidden, 2 * inner))
        )
        layer = Experts(up, down, chosen)
        for rows in used().small.expert_rows:
            x, out = (torch.randn(rows, hidden, device=used().device) for _ in range(2))
            logits = [torch.randn(rows, count, device=used().device) for _ in range(8)]
            mixed = _torch_experts(layer, x.bfloat16(), logits[0]).float()
            error = error_of(ops.moe(layer, x, logits[0], out), out, lambda: mixed)  # noqa: B023
            mine = measure([ops.moe(layer, x, each, out) for each in logits])
            unique = sum(len(each.topk(chosen).indices.unique()) for each in logits) / len(logits)
            title = f"MoE {name} B={rows}"
            if rows < 512:
                row = rated("experts", title, mine, unique * 6 * hidden * inner, "read", top)
            else:
                row = rated("experts", title, mine, 6.0 * rows * chosen * hidden * inner, "flops", top)
            yield judged(row, error, NARROW)
            call = [partial(_torch_experts, layer, x.bfloat16(), each) for each in logits]
            yield peer(title, mine, "cuBLAS, expert by expert", partial(_not_captured, call), "experts")


def _embedded(tokens: Tensor, table: Tensor) -> Tensor:
    return F.embedding(tokens, table).float()


def _not_captured(calls: list[partial[Tensor]]) -> list[Call]:
    """Returns the calls as they are: only the host knows which experts have rows, so no graph can be captured and
    all experts run.
    """
    return list(calls)


def _torch_experts(layer: Experts, x: Tensor, logits: Tensor) -> Tensor:
    weight, which = torch.softmax(logits, -1).topk(layer.chosen)
    shares = torch.zeros_like(logits).scatter_(1, which, weight / weight.sum(-1, keepdim=True)).bfloat16()
    out = torch.zeros_like(x)
    for number in range(len(layer.down)):
        gate, up = (x @ layer.gate_up[number].T).chunk(2, -1)
        out += shares[:, number, None] * ((F.silu(gate) * up) @ layer.down[number].T)
    return out


def drafts(ops: Ops, top: Ceilings) -> Iterator[Row]:
    """Speculative acceptance, and verifying K drafts beside decoding one token."""
    batch, count, length = used().small.drafts
    vocab = used().shape.vocab
    tokens = torch.randint(0, vocab, (batch, count), dtype=torch.int32, device=used().device)
    emitted = torch.zeros(batch, count + 1, dtype=torch.int32, device=used().device)
    chosen = torch.randint(0, vocab, (batch, count + 1), dtype=torch.int32, device=used().device)
    by_choice = {"tokens": tokens, "emitted": emitted, "chosen": chosen}
    table = draft_table(by_choice)
    error = accept_error(ops.accept(table, vocab, by_choice), table, by_choice)
    took = measure([ops.accept(table, vocab, by_choice)])
    name = f"accept B={batch} K={count}"
    row = rated("drafts", f"{name}, by the target's choices", took, 12.0 * batch * (count + 1), "copy", top)
    yield judged(row, error, EXACT)
    uniform = torch.rand(2, batch, count + 1, dtype=torch.float64, device=used().device)
    rejection = {
        "tokens": tokens,
        "emitted": emitted,
        "accept": uniform[0],
        "draw": uniform[1],
        "target": torch.randn(batch, count + 1, vocab, device=used().device),
        "proposed": torch.randn(batch, count, vocab, device=used().device).softmax(-1),
    }
    table = draft_table(rejection)
    error = accept_error(ops.accept(table, vocab, rejection), table, rejection)
    took = measure([ops.accept(table, vocab, rejection)])
    read = 4.0 * batch * vocab * (2 * count + 1)
    yield judged(rated("drafts", f"{name}, by rejection", took, read, "read", top), error, EXACT)
    compiled = used().compile(_torch_accept)
    call = partial(compiled, rejection["target"], rejection["proposed"], tokens.long(), uniform[0].float())
    yield peer(f"{name}, by rejection", took, "Triton", lambda: [call], "drafts")
    blocks = length // cases.PAGE
    pool = KvPool(blocks * batch, "bfloat16", used().shape.kv_heads, used().shape.head_dim)
    order = torch.randperm(blocks * batch, device=used().device).int().view(batch, blocks)
    times = {}
    for queries in (1, count + 1):
        q = torch.randn(batch * queries, used().shape.heads, used().shape.head_dim, device=used().device)
        items, out = item_table(order, [length - queries] * batch, queries), torch.empty_like(q)
        attend = ops.attention(pool, q, items, out)
        error = attention_error(attend, pool, order, [length - queries] * batch, q, out)
        times[queries] = measure([attend])
    title = f"verify attention B={batch} L={length} K={count}"
    row = versus("drafts", title, times[count + 1], "decode attention", times[1], VERIFY_TARGET)
    yield judged(row, error, ROUNDED)


def _torch_accept(target: Tensor, proposed: Tensor, tokens: Tensor, accept: Tensor) -> Tensor:
    """The first draft that falls, and the token drawn in its place."""
    p, count = target.softmax(-1), tokens.shape[1]
    of_token = p[:, :count].gather(2, tokens[..., None])[..., 0]
    stands = accept[:, :count] * proposed.gather(2, tokens[..., None])[..., 0] < of_token
    first = stands.int().cumprod(1).sum(1)
    rest = (p[:, :count] - proposed).clamp_min(0)
    rows = torch.cat((rest, p[:, count:]), 1)[torch.arange(len(p), device=p.device), first]
    return torch.stack((first, (rows / torch.empty_like(rows).exponential_()).argmax(-1)))


PARTS: dict[str, Part] = {"small": small, "experts": experts, "drafts": drafts}
