"""Scales for FP8 KV, one number per layer for K and for V, as compressed-tensors and vLLM read them.

Knows nothing of weights' rounding. A scale is the largest number that the calibration text puts into the layer's
KV, over the largest of e4m3. Source:
https://docs.vllm.ai, "Quantized KV Cache"; the tensors are ``self_attn.k_scale`` and ``self_attn.v_scale``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.program.ops import Linear, Op, PagedAttention, RopeAppend
from baton.engine.program.program import Program, Weight
from baton.protos.errors import ConfigError
from baton.quantize.grids import E4M3_TOP

LEAST = 1e-12  # a scale's least value, because KV of zeros alone has to be divided by it too


def require_plain_kv(program: Program, layers: Sequence[Sequence[Op]]) -> None:
    """Raises ConfigError if some layer keeps something else than K and V of heads, which has no such scales."""
    for ops in layers:
        attends = any(isinstance(op, PagedAttention) for op in ops)
        if program.states or not attends or kv_product(ops) is None:
            text = "--kv-cache-dtype is for models whose layers all keep K and V of heads; leave it out"
            raise ConfigError(text, "kv_cache_dtype")


def kv_product(ops: Sequence[Op]) -> str | None:
    """Returns the weight of the product that makes a layer's K and V; None if there is no such product."""
    append = next((op for op in ops if isinstance(op, RopeAppend)), None)
    found = (op.weight for op in ops if isinstance(op, Linear) and append is not None and op.out == append.qkv)
    return next(found, None)


def kv_scales(peaks: Tensor, product: Weight) -> dict[str, Tensor]:
    """Returns a layer's two scales by tensor name. ``peaks`` (2, channels) has the largest magnitudes of K's and
    V's channels, ``product`` is the weight that makes them.
    """
    attention = product.sources[0].rsplit(".", 2)[0]
    scales = (peaks.amax(1) / E4M3_TOP).clamp(min=LEAST).float()
    return {f"{attention}.{name}_scale": scale.clone() for name, scale in zip("kv", scales.split(1), strict=True)}


def channel_peaks(rows: Tensor, block: int) -> Tensor:
    """Returns the largest magnitude of each channel, (2, channels), of K and V in ``rows`` (pages x 2 x block,
    channels), in which ``block`` rows of K and of V take turns.
    """
    return rows.view(-1, 2, block, rows.shape[1]).abs().amax((0, 2))


def joined(before: Tensor | None, peaks: Tensor) -> Tensor:
    """Returns the larger of both, channel by channel."""
    return peaks if before is None else torch.maximum(before, peaks)
