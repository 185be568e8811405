"""Grouped-query attention over paged K and V (https://arxiv.org/abs/2309.06180), for prefill chunks and decoding
alike.

Knows nothing of sequences, windows or causality: the jobs' masks define what each row sees. A job gathers its
blocks once per layer; a sequence's result depends only on the shape of its own job, never on other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.paged_attention.job import AttentionJob


def paged_attention(
    q: Tensor,
    kv_blocks: Tensor,
    jobs: Sequence[AttentionJob],
    layer: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns attention outputs (rows, heads x head_dim) for q (rows, heads, head_dim).

    ``kv_blocks`` are all pages' blocks (blocks, 16, kv_heads, head_dim). Rows that no job names (padding) are zero.
    For ``softcap`` and ``sinks`` (heads,) see ``attend_by_parts``.
    """
    rows, heads, head_dim = q.shape
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for job in jobs:
        end = job.first + job.batch * job.queries
        keys, values = _gather(kv_blocks, job, layer, q.device)
        if softcap or sinks is not None:
            rows_of = q[job.first : end].reshape(job.batch, job.queries, heads, head_dim).transpose(1, 2)
            found = attend_by_parts(rows_of, keys, values, job.mask, scale, softcap, sinks)
            out[job.first : end] = found.transpose(1, 2).reshape(-1, heads, head_dim)
            continue
        attend = _attend_one if job.queries == 1 else _attend_many
        out[job.first : end] = attend(q[job.first : end], keys, values, job.mask, scale)
    return out.view(rows, heads * head_dim)


def attend_by_parts(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Returns attention outputs in the shape of q, with capped scores (Gemma 2, https://arxiv.org/abs/2408.00118)
    or sinks.

    q is (batch, heads, queries, head_dim), keys and values (batch, kv_heads, tokens, head_dim); ``mask`` is added
    to the scores. A sink is a head's score of one additional key, which has no value.
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = (plane.repeat_interleave(group, 1) for plane in (keys, values))
    scores = q @ keys.transpose(2, 3) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, scores.dtype)).to(q.dtype)
    return weights[..., : keys.shape[2]] @ values


def _gather(kv_blocks: Tensor, job: AttentionJob, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns K and V as (batch, kv_heads, tokens, head_dim)."""
    found = kv_blocks.index_select(0, job.blocks[layer]).to(device)
    keys, values = found.view(2, job.batch, -1, *kv_blocks.shape[2:]).transpose(2, 3).unbind(0)
    return keys, values


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attends with one query per sequence: heads that share a KV head become its query rows, so that K is read
    once.
    """
    batch, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    bias = mask.expand(-1, -1, heads // kv_heads, -1)
    found = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scale)
    return found.reshape(batch, heads, head_dim)


def _attend_many(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attends with the causal rows of a chunk of one sequence, or of several with the same shape."""
    batch = keys.shape[0]
    rows = q.reshape(batch, -1, *q.shape[1:]).transpose(1, 2)
    found = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return found.transpose(1, 2).reshape(q.shape)
