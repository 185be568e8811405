"""compressed-tensors checkpoints (https://github.com/vllm-project/compressed-tensors): int8, fp8 (E4M3), int4.

Knows nothing of models. Per linear layer: weight int8 or float8_e4m3fn with weight_scale per tensor, per channel
or per group and, where not symmetric, weight_zero_point; or weight_packed int32 (n, k / 8) with weight_shape.
Activations are always quantized per token at run time, whatever scales for them the checkpoint brings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.quant import Reader, Tensors
from baton.engine.quant.gptq import unpack
from baton.kernels.linear.integers import Integers, Scaled
from baton.protos.errors import CheckpointError

FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
STRATEGIES = ("tensor", "channel", "group")


def reader(model: ModelConfig, tensors: Tensors) -> Reader:
    """Checks the settings. Raises CheckpointError naming the one that isn't known."""
    settings = model.fields.get("quantization_config") or model.fields["compression_config"]
    if settings.get("format") not in FORMATS:
        known = ", ".join(FORMATS)
        raise model.error("quantization_config.format", f"is {settings.get('format')!r}; known are {known}")
    for group in settings.get("config_groups", {}).values():
        _require_known(model, group.get("weights") or {})
    return CompressedReader(tensors)


def _require_known(model: ModelConfig, weights: dict[str, Any]) -> None:
    kind = weights.get("type"), weights.get("num_bits")
    if kind not in (("int", 8), ("int", 4), ("float", 8)):
        raise model.error(
            "quantization_config", f"has {kind[1]}-bit {kind[0]} weights; int4, int8 and fp8 are known"
        )
    if weights.get("strategy") not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise model.error("quantization_config", f"has strategy {weights.get('strategy')!r}; known are {known}")
    if weights.get("actorder") not in (None, False, "weight"):
        raise model.error("quantization_config", f"has actorder {weights['actorder']!r}; none and weight are known")


class CompressedReader:
    """Implements ``Reader``."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._names = tensors, set(tensors.names())

    def read(self, name: str, shape: tuple[int, ...]) -> Integers | Scaled | None:
        """The layer of ``name``; None where it isn't quantized."""
        if f"{name}_scale" not in self._names:
            return None
        scale = self._tensors.tensor(f"{name}_scale").float().reshape(-1, self._groups(name))
        scale = scale.expand(shape[0], -1).contiguous()
        if f"{name}_packed" in self._names:
            q = unpack(self._tensors.tensor(f"{name}_packed"), 4)[:, : shape[1]] - 8
            return self._integers(name, q.to(torch.int8), 4, scale)
        values = self._tensors.tensor(name)
        if values.dtype == torch.float8_e4m3fn:
            if scale.shape[1] > 1:
                raise CheckpointError(f"tensor {name}_scale: fp8 with groups is not known", "model")
            return Scaled(values, scale[:, 0])
        if values.dtype != torch.int8:
            raise CheckpointError(f"tensor {name} is {values.dtype}; int8 and float8_e4m3fn are known", "model")
        return self._integers(name, values, 8, scale)

    def _groups(self, name: str) -> int:
        shape = self._tensors.tensor(f"{name}_scale").shape
        return shape[1] if len(shape) == 2 else 1

    def _integers(self, name: str, q: Tensor, bits: int, scale: Tensor) -> Integers:
        groups = scale.shape[1]
        group = 0 if groups == 1 else q.shape[1] // groups
        if group % 16 or (group and group * groups != q.shape[1]):
            raise CheckpointError(
                f"tensor {name}_scale: groups of {group} are not known; use multiples of 16", "model"
            )
        if f"{name}_zero_point" not in self._names:
            return Integers(q, bits, group, scale)
        zero = self._tensors.tensor(f"{name}_zero_point")
        if zero.dtype == torch.int32 and zero.shape[0] != scale.shape[0]:
            zero = unpack(zero.T, 4).T - 8
        zero = zero.float().reshape(-1, groups).expand_as(scale)
        return Integers(q, bits, group, scale, scale * zero if bool(zero.any()) else None)
