"""Computes rotary frequencies with their scaling: default, linear, llama3, yarn, dynamic up to the model's own
context.

Knows nothing of heads or pages. Formulas as in Hugging Face transformers' ``modeling_rope_utils`` (Apache-2.0), in
the same float32 steps, so that the tables are equal bit by bit. "dynamic" rescales only beyond
``max_position_embeddings``, which is never reached here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.program.ops import Rope
from baton.protos.errors import CheckpointError


def frequencies(rope: Rope, head_dim: int, max_position: int) -> tuple[Tensor, float]:
    """Returns inverse frequencies (head_dim / 2,) float32 and the factor on cos and sin. Raises CheckpointError by
    name.
    """
    if rope.kind not in _KINDS:
        choices = ", ".join(sorted(_KINDS))
        raise CheckpointError(f"rope type {rope.kind!r} is unknown; choose from {choices}", "rope_parameters")
    if rope.parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported", "partial_rotary_factor")
    parameters = {"original_max_position_embeddings": float(max_position), **rope.parameters}
    try:
        return _KINDS[rope.kind](rope.theta, head_dim, parameters)
    except KeyError as missing:
        name = missing.args[0]
        raise CheckpointError(f"rope type {rope.kind!r} needs {name} in rope_parameters", name) from None


def tables(positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cos and sin (positions, 1, head_dim); sin's first half is negated, as ``rope_append`` takes it."""
    angles = positions[:, None].float() * inverse
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def _default(theta: float, head_dim: int, parameters: dict[str, float]) -> tuple[Tensor, float]:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)), 1.0


def _linear(theta: float, head_dim: int, parameters: dict[str, float]) -> tuple[Tensor, float]:
    return _default(theta, head_dim, parameters)[0] / parameters["factor"], 1.0


def _llama3(theta: float, head_dim: int, parameters: dict[str, float]) -> tuple[Tensor, float]:
    inverse, _ = _default(theta, head_dim, parameters)
    factor, low, high = (parameters[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(medium, between, scaled), 1.0


def _yarn(theta: float, head_dim: int, parameters: dict[str, float]) -> tuple[Tensor, float]:
    factor = parameters["factor"]
    powers = theta ** (torch.arange(0, head_dim, 2).to(torch.float) / head_dim)
    low, high = _yarn_range(theta, head_dim, parameters)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    inverse = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return inverse, parameters.get("attention_factor") or _yarn_attention(factor, parameters)


def _yarn_range(theta: float, head_dim: int, parameters: dict[str, float]) -> tuple[float, float]:
    def turns_to_dim(turns: float) -> float:
        original = parameters["original_max_position_embeddings"]
        return (head_dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low = turns_to_dim(parameters.get("beta_fast") or 32)
    high = turns_to_dim(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention(factor: float, parameters: dict[str, float]) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    both = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(both[0]) / scale(both[1]) if both[0] and both[1] else scale(1.0)


_KINDS: dict[str, Callable[[float, int, dict[str, float]], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
