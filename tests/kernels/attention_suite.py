"""The checks of native rope_append and paged_attention, as functions of a library: the real one or a mutant.

Knows nothing of pytest. Each check raises AssertionError where the library is wrong.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from baton.kernels.paged_attention.native import Item, Pages, append, attend, attend_form, page_bytes
from baton.kernels.paged_attention.stored import quantized, read_layer

DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8_e4m3")
# On the error's norm as a share of the rows' RMS of V: q against int8 keys has 15 bits, everything else is float32,
# unless the library rounds q and weights to bf16 as bf16 keys and values are.
CLOSE = {"float32": 2e-6, "bfloat16": 2e-6, "float16": 2e-6, "int8": 2e-4, "fp8_e4m3": 4e-6}
ROUNDED = 2e-3
LENGTHS = (1, 2, 15, 16, 17, 255, 256, 257, 511, 530)
SHAPES = ((1, 1, 8), (4, 4, 64), (6, 2, 24), (5, 1, 80), (16, 1, 32), (12, 4, 64), (8, 4, 128))
# Heads, KV heads, dim: groups of 1 to 16 query heads, heads of one to five blocks of 64 bytes, whole and not.
GROUPS = (
    *((1, 1, 64), (4, 2, 80), (3, 1, 96), (8, 2, 128), (2, 1, 176), (3, 1, 192), (4, 1, 256), (2, 2, 256)),
    *((3, 1, 272), (5, 1, 64), (7, 1, 80), (8, 1, 96), (12, 1, 128), (16, 1, 64)),
)
GUARD = 3


class Case:
    """Sequences scattered over pages whose unused slots are NaN, with guard pages that nobody may touch."""

    def __init__(self, seed: int, dtype: str, shape: tuple[int, int, int], sizes: list[tuple[int, int]]) -> None:
        self.rng, self.dtype, self.sizes = random.Random(seed), dtype, sizes
        self.heads, self.kv_heads, self.head_dim = shape
        torch.manual_seed(seed)
        blocks = [-(-(start + queries) // 16) for start, queries in sizes]
        order = list(range(sum(blocks) + GUARD))
        self.rng.shuffle(order)
        self.layers, self.layer = 3, 1
        size = page_bytes(dtype, self.kv_heads, self.head_dim, self.layers)
        memory = torch.full((len(order), size), 0xFF, dtype=torch.uint8)
        self.kv = Pages(memory, dtype, self.kv_heads, self.head_dim, self.layers, self.layer)
        self.guards = order[:GUARD]
        tables = iter(order[GUARD:])
        self.items: list[Item] = [
            ([next(tables) for _ in range(n)], start, queries)
            for n, (start, queries) in zip(blocks, sizes, strict=True)
        ]
        width = self.heads + 2 * self.kv_heads
        self.qkv = [torch.randn(start + queries, width, self.head_dim) for start, queries in sizes]
        angles = torch.rand(600, self.head_dim // 2) * 6
        self.rope_angles = torch.cat((angles.cos(), angles.sin()), -1).contiguous()

    def write(self, library: ctypes.CDLL) -> None:
        """Append every sequence's K and V; ``q`` is then what is left of the new rows."""
        rotated = []
        for item, qkv in zip(self.items, self.qkv, strict=True):
            rows = qkv.clone()
            append(library, rows, self.kv, [(item[0], 0, len(rows))], self.rope_angles)
            rotated.append(rows[item[1] :, : self.heads])
        self.q = torch.cat(rotated).contiguous()

    def rows(self, at: int) -> Tensor:
        """The stored rows' originals: K rotated, V as it is, (2, tokens, kv_heads, head_dim)."""
        qkv = self.qkv[at]
        keys = rotate(qkv[:, self.heads : self.heads + self.kv_heads], self.rope_angles)
        return torch.stack((keys, qkv[:, self.heads + self.kv_heads :]))

    def stored(self, at: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence as they lie in the pages."""
        pages = torch.tensor(self.items[at][0])
        planes = read_layer(
            self.kv.memory, pages, self.layer, self.layers, self.kv_heads, self.head_dim, self.dtype
        )
        end = len(self.qkv[at])
        return planes[0][:end], planes[1][:end]


def rotate(x: Tensor, rope_angles: Tensor) -> Tensor:
    """x (tokens, heads, head_dim) rotated by its positions' angles, in float64."""
    half = x.shape[-1] // 2
    cos, sin = (part[: len(x), None].double() for part in rope_angles.split(half, -1))
    a, b = x[..., :half].double(), x[..., half:].double()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).float()


def oracle(case: Case, window: int, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    """Attention in float64 over the very bytes in the pages; a sink is one more key, without a value."""
    found, first = [], 0
    for at, (_, start, queries) in enumerate(case.items):
        keys, values = (
            plane.double().repeat_interleave(case.heads // case.kv_heads, 1) for plane in case.stored(at)
        )
        q = case.q[first : first + queries].double()
        scores = torch.einsum("qhd,khd->hqk", q, keys) * case.head_dim**-0.5
        key, query = torch.arange(len(keys)), torch.arange(start, start + queries)[:, None]
        hidden = (key > query) | (key <= query - window if window else key < 0)
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        column = torch.full((case.heads,), -torch.inf).double() if sinks is None else sinks.double()
        beside = column[:, None, None].expand(-1, queries, 1)
        weights = torch.cat((scores.masked_fill(hidden, -torch.inf), beside), -1).softmax(-1)[..., :-1]
        found.append(torch.einsum("hqk,khd->qhd", weights, values))
        first += queries
    return torch.cat(found)


@cache
def rounds_queries(library: ctypes.CDLL) -> bool:
    """Returns whether the library rounds q to bf16 where keys are: a q that differs by less is the same then."""
    case = Case(1, "bfloat16", (1, 1, 16), [(0, 40)])
    case.write(library)
    case.q = case.q.bfloat16().float()
    exact, more = (attend(library, case.q * by, case.kv, case.items) for by in (1.0, 1.0005))
    return torch.equal(exact, more)


def close(library: ctypes.CDLL, dtype: str) -> float:
    """Returns how close to the oracle the library comes, as a share of V's RMS."""
    return ROUNDED if dtype == "bfloat16" and rounds_queries(library) else CLOSE[dtype]


def mixed(seed: int) -> list[tuple[int, int]]:
    """A ragged batch of decodes and chunks: (tokens before, new tokens)."""
    rng = random.Random(seed)
    lengths = rng.sample(LENGTHS, 5)
    return [(0, lengths[0]), *((n - 1, 1) for n in lengths[1:3]), (min(lengths[3], 300), 37), (lengths[4], 4)]


def appended_rows_read_back(library: ctypes.CDLL, dtype: str, shape: tuple[int, int, int]) -> None:
    """Every row is where its position says, rounded as its dtype rounds; the rest of memory is untouched."""
    case = Case(7, dtype, shape, [(0, 33), (16, 1), (0, 16)])
    case.write(library)
    for at in range(3):
        for found, wanted in zip(case.stored(at), case.rows(at), strict=True):
            step = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3, "int8": 1.2e-2, "fp8_e4m3": 8e-2}[dtype]
            most = quantized(wanted, dtype).abs().amax(-1, keepdim=True).clamp_min(1e-3)
            assert bool(((found - wanted).abs() <= step * most).all())
    assert bool((case.kv.memory[case.guards] == 0xFF).all())
    layers = case.kv.memory.view(len(case.kv.memory), case.layers, -1)
    assert bool((layers[:, [0, 2]] == 0xFF).all())


def attention_is_the_oracles(
    library: ctypes.CDLL, dtype: str, shape: tuple[int, int, int], window: int = 0
) -> None:
    """Ragged mixed batches over permuted tables, unused slots NaN."""
    for seed in range(2):
        case = Case(seed, dtype, shape, mixed(seed + 11 * window))
        case.write(library)
        found, wanted = attend(library, case.q, case.kv, case.items, window), oracle(case, window)
        assert bool(torch.isfinite(found).all())
        error = (found - wanted).double().square().mean(-1).sqrt().max()
        assert error <= 4 * close(library, dtype), (dtype, shape, window, float(error))


def equal_values_come_back(library: ctypes.CDLL, dtype: str) -> None:
    """Weights come to 1 together, however they are rounded: if all keys have one value, each row is that value."""
    case = Case(12, dtype, (6, 2, 80), [(0, 90), (529, 1), (250, 9)])
    for qkv in case.qkv:
        qkv[:, -2:] = qkv[:1, -2:]
    case.write(library)
    wanted = torch.cat([case.stored(at)[1][:1].expand(n, -1, -1) for at, (_, _, n) in enumerate(case.items)])
    error = (attend(library, case.q, case.kv, case.items) - wanted.repeat_interleave(3, 1)).abs().max()
    assert error <= (1e-4 if dtype == "int8" else 4e-6), (dtype, float(error))


def company_changes_no_bit(library: ctypes.CDLL, dtype: str, window: int = 0) -> None:
    """A row is bitwise the same alone, in a batch, in any chunk, as a decode, and beside a NaN sequence."""
    case = Case(3, dtype, (6, 2, 64), [(0, 530), (299, 1), (100, 40)])
    case.write(library)
    whole = attend(library, case.q, case.kv, case.items, window)
    pages = case.items[0][0]
    for start, queries in ((0, 16), (255, 2), (256, 1), (529, 1), (400, 5), (201, 64)):
        part = attend(
            library, case.q[start : start + queries].contiguous(), case.kv, [(pages, start, queries)], window
        )
        assert torch.equal(part, whole[start : start + queries]), (start, queries)
    poisoned = case.q.clone()
    poisoned[530] = torch.nan
    beside = attend(library, poisoned, case.kv, case.items, window)
    assert torch.equal(beside[:530], whole[:530])
    assert torch.equal(beside[531:], whole[531:])
    assert bool(torch.isnan(beside[530]).all())


def a_decode_has_a_chunks_bits(library: ctypes.CDLL, dtype: str, shape: tuple[int, int, int], window: int) -> None:
    """Rows one by one, a few of them, and within a chunk of many: the same bits, near the oracle; plain, capped and
    beside sinks. Tables are permuted, the last page is partly filled, unused slots are NaN.
    """
    case = Case(12, dtype, shape, [(0, 281)])
    case.write(library)
    pages, sinks = case.items[0][0], torch.linspace(-2, 3, shape[0])
    for softcap, beside in ((0.0, None), (4.0, sinks)):
        whole = attend_form(library, case.q, case.kv, case.items, window, softcap, beside)
        error = (whole - oracle(case, window, softcap, beside)).double().square().mean(-1).sqrt().max()
        assert error <= 4 * close(library, dtype), (dtype, shape, window, softcap, float(error))
        for start, queries in ((0, 1), (15, 1), (16, 2), (37, 1), (255, 3), (256, 1), (280, 1)):
            rows = case.q[start : start + queries].contiguous()
            part = attend_form(library, rows, case.kv, [(pages, start, queries)], window, softcap, beside)
            assert torch.equal(part, whole[start : start + queries]), (dtype, shape, window, softcap, start)


def forms_are_the_oracles(library: ctypes.CDLL, dtype: str, window: int = 0) -> None:
    """Capped scores, sinks below and far above the scores, and both; a row's bits are its own."""
    shape = (6, 2, 24)
    case = Case(4, dtype, shape, mixed(4))
    case.write(library)
    case.q *= 3
    for softcap, sinks in ((2.5, None), (0.0, torch.linspace(-4, 40, 6)), (5.0, torch.linspace(3, -3, 6))):
        found = attend_form(library, case.q, case.kv, case.items, window, softcap, sinks)
        error = (found - oracle(case, window, softcap, sinks)).double().square().mean(-1).sqrt().max()
        assert error <= 4 * close(library, dtype), (dtype, window, softcap, float(error))
        pages, start, queries = case.items[-1]
        alone = attend_form(
            library, case.q[-1:].contiguous(), case.kv, [(pages, start + queries - 1, 1)], window, softcap, sinks
        )
        assert torch.equal(alone, found[-1:])


def a_part_of_each_head_rotates(library: ctypes.CDLL, rotated: int) -> None:
    """The first dims as a head of that size would, the others not at all."""
    case = Case(9, "float32", (4, 2, 24), [(0, 21)])
    qkv = case.qkv[0].clone()
    rope_angles = case.rope_angles[:, :rotated].contiguous()
    append(library, qkv, case.kv, [(case.items[0][0], 0, 21)], rope_angles, rotated=rotated)
    original = case.qkv[0]
    found = torch.cat((qkv[:, :4], case.stored(0)[0]), 1)
    wanted = torch.cat((rotate(original[:, :6, :rotated], rope_angles), original[:, :6, rotated:]), -1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(case.stored(0)[1], original[:, 6:])


Check = Callable[[ctypes.CDLL], None]
FORMS: tuple[Check, ...] = (
    lambda lib: forms_are_the_oracles(lib, "float32"),
    lambda lib: a_part_of_each_head_rotates(lib, 16),
)
QUICK: tuple[Check, ...] = (
    *(lambda lib, d=dtype: appended_rows_read_back(lib, d, (6, 2, 24)) for dtype in DTYPES),
    *(lambda lib, d=dtype: attention_is_the_oracles(lib, d, (6, 2, 24)) for dtype in DTYPES),
    lambda lib: attention_is_the_oracles(lib, "bfloat16", (5, 1, 80), 37),
    *(lambda lib, d=dtype: company_changes_no_bit(lib, d) for dtype in DTYPES),
)
