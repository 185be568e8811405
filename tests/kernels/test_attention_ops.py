"""rope_append and paged_attention against slow, obvious loops over tokens and heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from baton.kernels.paged_attention.job import AttentionJob
from baton.kernels.registry import kernels

K = kernels()
BLOCK = 16


def obvious_attention(q: Tensor, keys: Tensor, values: Tensor, seen: range) -> Tensor:
    """One query (heads, head_dim) over keys and values (tokens, kv_heads, head_dim), positions ``seen``."""
    heads, width = q.shape
    share = heads // keys.shape[1]
    out = torch.zeros_like(q)
    for head in range(heads):
        scores = [float(q[head] @ keys[at, head // share]) / math.sqrt(width) for at in seen]
        weights = torch.softmax(torch.tensor(scores, dtype=q.dtype), 0)
        for weight, at in zip(weights, seen, strict=True):
            out[head] += weight * values[at, head // share]
    return out


def paged(keys: Tensor, values: Tensor, table: list[int], pages: int, layers: int, layer: int) -> Tensor:
    """kv_blocks (pages x layers x 2, 16, kv_heads, head_dim) with one sequence scattered over ``table``."""
    kv = torch.randn(pages, layers, 2, BLOCK, *keys.shape[1:], dtype=keys.dtype)
    for at in range(len(keys)):
        kv[table[at // BLOCK], layer, 0, at % BLOCK] = keys[at]
        kv[table[at // BLOCK], layer, 1, at % BLOCK] = values[at]
    return kv.view(-1, BLOCK, *keys.shape[1:])


def job(table: list[int], queries: list[int], window: int, layers: int) -> AttentionJob:
    """One sequence's job, its mask written cell by cell."""
    mask = torch.full((1, 1, len(queries), len(table) * BLOCK), -torch.inf, dtype=torch.float64)
    for row, query in enumerate(queries):
        mask[0, 0, row, max(0, query - window + 1 if window else 0) : query + 1] = 0
    keys = torch.tensor(table) * 2 * layers
    blocks = tuple(torch.cat((keys, keys + 1)) + 2 * layer for layer in range(layers))
    return AttentionJob(0, 1, len(queries), blocks, mask)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 8), (6, 2, 24), (5, 1, 80)])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("queries", [[36], [33, 34, 35, 36]])
def test_attention_reads_what_the_mask_shows(
    heads: int, kv_heads: int, width: int, window: int, queries: list[int]
) -> None:
    tokens, table, layers = 37, [5, 0, 3], 3
    keys, values = torch.randn(2, tokens, kv_heads, width, dtype=torch.float64).unbind(0)
    q = torch.randn(len(queries), heads, width, dtype=torch.float64)
    kv = paged(keys, values, table, 6, layers, layer=1)
    found = K.paged_attention(q, kv, [job(table, queries, window, layers)], 1, width**-0.5)
    for row, query in enumerate(queries):
        seen = range(max(0, query - window + 1 if window else 0), query + 1)
        wanted = obvious_attention(q[row], keys, values, seen)
        torch.testing.assert_close(found[row].view(heads, width), wanted)


def test_rows_without_a_job_are_zero() -> None:
    q = torch.randn(4, 2, 8)
    assert not K.paged_attention(q, torch.zeros(2, BLOCK, 2, 8), [], 0, 1.0).any()


@pytest.mark.parametrize("normed", [False, True])
def test_rope_append_rotates_and_stores_in_the_named_slots(normed: bool) -> None:
    heads, kv_heads, width, stored = 4, 2, 6, 3
    qkv = torch.randn(4, heads + 2 * kv_heads, width)
    angles = torch.randn(4, width // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
    rows = torch.zeros(40, kv_heads * width)
    slots = torch.tensor([3, 4, 20, 11, 12, 28])
    norms = (torch.rand(width), torch.rand(width)) if normed else (None, None)
    q = K.rope_append(qkv, cos, sin, rows, slots, kv_heads, *norms, 1e-6)
    for row in range(stored):
        for head in range(heads):
            torch.testing.assert_close(q[row, head], rotated(qkv[row, head], angles[row], norms[0]))
        for head in range(kv_heads):
            at = slice(head * width, (head + 1) * width)
            torch.testing.assert_close(rows[slots[row], at], rotated(qkv[row, heads + head], angles[row], norms[1]))
            torch.testing.assert_close(rows[slots[stored + row], at], qkv[row, heads + kv_heads + head])
    assert len(rows.abs().sum(-1).nonzero()) == 2 * stored


def rotated(x: Tensor, angles: Tensor, norm: Tensor | None) -> Tensor:
    """One head's vector, pair by pair (i, i + half)."""
    if norm is not None:
        x = x / (x.square().mean() + 1e-6).sqrt() * norm
    half, out = len(angles), torch.empty_like(x)
    for i, angle in enumerate(angles):
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out
