"""Reads torchao checkpoints as transformers saves them to safetensors (https://github.com/pytorch/ao): int8 and
float8.

Knows nothing of models. Per linear layer: _weight_qdata int8 (n, k), with _weight_scale float32 (n, groups) and,
where not symmetric, _weight_zero_point; or _weight_qdata float8_e4m3fn with _weight_scale per row or one for all.
Each layer's tensors determine how it is read. Activations are rounded as for other weights of the kind. int4
layouts are specific to one device, and aren't read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.quant import LEAST_GROUP, Reader, Tensors
from baton.engine.quant.fp8 import scaled
from baton.kernels.linear.integers import Integers, ScaledFloats


def reader(model: ModelConfig, tensors: Tensors) -> Reader:
    """Returns a reader of the checkpoint's torchao weights."""
    return TorchAoReader(tensors)


class TorchAoReader:
    """Reads a checkpoint's torchao weights; implements ``Reader``."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._names = tensors, set(tensors.names())

    def read(self, name: str, shape: tuple[int, ...]) -> Integers | ScaledFloats | None:
        """Returns the weight ``name`` of ``shape`` (n, k); None if it isn't quantized. Raises CheckpointError if
        its tensors don't fit or are int4.
        """
        base = f"{name.removesuffix('weight')}_weight"
        if f"{base}_qdata" not in self._names:
            return None
        q = self._tensors.tensor(f"{base}_qdata")
        if q.dtype not in (torch.int8, torch.float8_e4m3fn):
            text = f"is {q.dtype}; int8 and float8_e4m3fn are known: of 4 bits use another method's checkpoint"
            raise self._tensors.error(f"{base}_qdata", text)
        if tuple(q.shape) != shape:
            raise self._tensors.error(f"{base}_qdata", f"has shape {tuple(q.shape)}, config.json asks for {shape}")
        if q.dtype == torch.float8_e4m3fn:
            return scaled(self._tensors, f"{base}_qdata", q, f"{base}_scale", None)
        return self._integers(base, q)

    def _integers(self, base: str, q: Tensor) -> Integers:
        scale = self._tensors.tensor(f"{base}_scale").float()
        groups = scale.shape[1] if scale.dim() == 2 else 1
        group = 0 if groups <= 1 else q.shape[1] // groups
        fits = groups and scale.numel() in (groups, len(q) * groups) and (not group or group * groups == q.shape[1])
        if not fits or group % LEAST_GROUP:
            text = f"has shape {tuple(scale.shape)} for a weight {tuple(q.shape)}"
            remedy = f"a scale per row, or per group of a multiple of {LEAST_GROUP} inputs, is known"
            raise self._tensors.error(f"{base}_scale", f"{text}; {remedy}")
        scale = scale.reshape(-1, groups).expand(len(q), -1).contiguous()
        return Integers(q, 8, group, scale, self._mins(base, scale))

    def _mins(self, base: str, scale: Tensor) -> Tensor | None:
        """Returns the scaled zero points that are subtracted, (n, groups); None if all are 0."""
        name = f"{base}_zero_point"
        if name not in self._names:
            return None
        zero = self._tensors.tensor(name).float()
        if zero.numel() not in (1, scale.numel()):
            raise self._tensors.error(name, f"has shape {tuple(zero.shape)}, not that of its scales")
        return scale * zero.reshape(-1, 1 if zero.numel() == 1 else scale.shape[1]) if bool(zero.any()) else None
