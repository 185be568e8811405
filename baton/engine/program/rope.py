"""Computes rotary frequencies with their scaling: default, linear, llama3, yarn, longrope, and dynamic up to the
model's own context.

Knows nothing of heads or pages. Formulas are those of Hugging Face transformers' ``modeling_rope_utils``
(Apache-2.0), in the same float32 steps, so that the tables are equal bit by bit. "dynamic" rescales only beyond
``max_position_embeddings``, which contexts never exceed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from msgspec.structs import replace
from torch import Tensor

from baton.engine.program.program import NO_ROPE, Program, Rope
from baton.protos.errors import CheckpointError


def longest_context(rope: Rope, most: int) -> int:
    """Returns the tokens of context that a model was made for, ``most`` by its ``max_position_embeddings``. With
    yarn it is the original context times the factor, where that is more: settings that lengthen the context don't
    change the former.
    """
    original = rope.parameters.get("original_max_position_embeddings", 0.0)
    return max(most, int(original * rope.parameters.get("factor", 1.0))) if rope.kind == "yarn" else most


def frequencies(rope: Rope, head_dim: int, max_position: int) -> tuple[Tensor, float]:
    """Returns the inverse frequencies (rotated dims / 2,) float32, and the factor on cos and sin. Raises
    CheckpointError naming the field.
    """
    if rope.kind == NO_ROPE:
        return torch.zeros(head_dim // 2), 1.0
    if rope.kind not in (*_KINDS, LONGROPE):
        choices = ", ".join(sorted((*_KINDS, LONGROPE)))
        raise CheckpointError(f"rope type {rope.kind!r} is unknown; choose from {choices}", "rope_parameters")
    rotated = int(head_dim * rope.parameters.get("partial_rotary_factor", 1.0))
    if rotated % 2 or not 0 < rotated <= head_dim:
        text = f"partial_rotary_factor turns {rotated} of {head_dim} dims; an even number of them is needed"
        raise CheckpointError(text, "partial_rotary_factor")
    parameters = {"original_max_position_embeddings": float(max_position), **rope.parameters}
    _require_positive({"rope_theta": rope.theta} | parameters)
    try:
        if rope.kind == LONGROPE:
            return _longrope(rope, rotated, parameters, max_position)
        return _KINDS[rope.kind](rope.theta, rotated, parameters)
    except KeyError as missing:
        name = missing.args[0]
        raise CheckpointError(f"rope type {rope.kind!r} needs {name} in rope_parameters", name) from None
    except (ArithmeticError, ValueError) as error:
        text = f"rope type {rope.kind!r} can't be computed of {rope.parameters} and rope_theta {rope.theta:g}"
        raise CheckpointError(f"{text}: {error}", "rope_parameters") from None


def _require_positive(parameters: dict[str, float]) -> None:
    for name in ("rope_theta", "factor", "original_max_position_embeddings"):
        if not parameters.get(name, 1.0) > 0:
            raise CheckpointError(f"{name} is {parameters[name]:g}; it must be above 0", name)


LONGROPE = "longrope"


class RopeTables:
    """Computes the cos and sin tables of all ropes of a model. Raises CheckpointError naming the field."""

    def __init__(self, ropes: Sequence[Rope], head_dim: int, max_position: int) -> None:
        self._found = [frequencies(rope, head_dim, max_position) for rope in ropes]

    @property
    def rotated(self) -> tuple[int, ...]:
        """Returns the number of rotated dims of a head, by rope."""
        return tuple(2 * len(inverse) for inverse, _ in self._found)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Returns the column at which each rope's part of ``by_position`` begins, and after the last the number of
        columns.
        """
        return tuple(accumulate(self.rotated, initial=0))

    @property
    def width(self) -> int:
        """Returns the number of columns of ``by_position``."""
        return sum(self.rotated)

    def of(self, positions: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Returns (cos, sin) of ``positions`` for each rope, each (positions, 1, rotated dims), as ``tables``
        returns them.
        """
        return [tables(positions, *found, dtype) for found in self._found]

    def by_position(self, positions: int) -> Tensor:
        """Returns a table (positions, width) float32 for positions from 0 on: per rope rotated / 2 cosines, then as
        many sines.
        """
        parts = []
        for cos, sin in self.of(torch.arange(positions), torch.float32):
            half = cos.shape[-1] // 2
            parts += [cos[:, 0, :half], sin[:, 0, half:]]
        return torch.cat(parts, -1).contiguous()


def tables(positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, each (positions, 1, rotated dims) of ``dtype``; sin's first half is negated, for
    ``rope_append``.

    ``inverse`` are the inverse frequencies, and ``factor`` multiplies cos and sin.
    """
    angles = positions[:, None].float() * inverse
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def _default(theta: float, head_dim: int, parameters: dict[str, float]) -> tuple[Tensor, float]:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)), 1.0


def _dynamic(theta: float, head_dim: int, parameters: dict[str, float]) -> tuple[Tensor, float]:
    """Returns the plain frequencies, or with Hunyuan's ``alpha`` those of a stretched base."""
    alpha = parameters.get("alpha") or 1.0
    return _default(theta * alpha ** (head_dim / (head_dim - 2)) if alpha != 1.0 else theta, head_dim, parameters)


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


def _longrope(rope: Rope, head_dim: int, parameters: dict[str, float], max_position: int) -> tuple[Tensor, float]:
    """Returns LongRoPE's frequencies and attention factor (https://arxiv.org/abs/2402.13753)."""
    if len(rope.factors[0]) != head_dim // 2:
        text = f"rope type longrope has {len(rope.factors[0])} factors for {head_dim // 2} frequencies"
        raise CheckpointError(text, "rope_parameters")
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor", max_position / original)
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    return 1.0 / (torch.tensor(rope.factors[0], dtype=torch.float32) * powers), attention


def for_context(program: Program, context: int | None) -> Program:
    """Returns ``program`` with longrope's factors for contexts of up to ``context`` tokens; others are returned
    unchanged.

    ``None`` stands for the longest context without extension. One set of factors serves all requests, because
    blocks of KV are shared between long and short ones.
    """
    if not program.plain_context or (context or 0) <= program.plain_context:
        return program
    long, parameters = program.rope.factors[1], program.rope.parameters
    if "long_mscale" in parameters:
        parameters = parameters | {"attention_factor": parameters["long_mscale"]}
    return replace(
        program, rope=replace(program.rope, factors=(long, long), parameters=parameters), plain_context=0
    )


_KINDS: dict[str, Callable[[float, int, dict[str, float]], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
