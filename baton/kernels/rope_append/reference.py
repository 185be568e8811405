"""Norms queries and keys, rotates them, and stores K and V in their pages, between QKV projection and attention.

Knows nothing of sequences: a slot says where a row of K or V goes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.rms_norm.reference import normed


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_rows: Tensor,
    slots: Tensor,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotates q and k, stores k and v; returns q (rows, heads, head_dim).

    qkv (rows, heads + 2 kv_heads, head_dim); cos, sin (rows, 1, rotated dims), sin's first half negated; kv_rows
    (slots of all pages, kv_heads x head_dim); slots (2 n,): those of the first n rows' k, then of their v.
    """
    heads = qkv.shape[1] - 2 * kv_heads
    qk = qkv[:, : heads + kv_heads]
    if q_norm is not None and k_norm is not None:
        qk = torch.cat((normed(qk[:, :heads], q_norm, eps), normed(qk[:, heads:], k_norm, eps)), 1)
    rotated_heads = rotate(qk, cos, sin)
    stored = slots.shape[0] // 2
    fresh = torch.cat((rotated_heads[:stored, heads:], qkv[:stored, heads + kv_heads :]))
    kv_rows.index_copy_(0, slots, fresh.reshape(2 * stored, -1).to(kv_rows.device))
    return rotated_heads[:, :heads]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x with rotary embedding, halves as pairs (Hugging Face's convention); sin's first half comes negated.

    Dimensions beyond those of cos and sin stay as they are.
    """
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], cos, sin), x[..., rotated:]), -1)
    half = rotated // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin
