"""Reads AWQ checkpoints (https://arxiv.org/abs/2306.00978), as AutoAWQ writes them for its GEMM: 4 bits.

Knows nothing of models. Per linear layer: qweight int32 (k, n / 8) and qzeros int32 (groups, n / 8), outputs packed
in the order 0 2 4 6 1 3 5 7 from the low bits up; scales (groups, n).
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.quant import Reader, Tensors, declared_group, packed_words, require_group
from baton.engine.quant.gptq import integers, unpack
from baton.kernels.linear.integers import Integers

BITS = 4  # bits of an integer; others are refused
PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # of outputs 0 … 7 in an int32


def reader(model: ModelConfig, tensors: Tensors) -> Reader:
    """Returns a reader of the checkpoint's AWQ weights. Raises CheckpointError naming a setting that isn't
    supported.
    """
    settings = model.fields["quantization_config"]
    bits = settings.get("bits", settings.get("w_bit"))
    version = str(settings.get("version", "gemm")).lower()
    if bits != BITS:
        raise model.error("quantization_config.bits", f"is {bits!r}; AWQ with {BITS} bits is known")
    if version != "gemm":
        raise model.error("quantization_config.version", f"is {version!r}; gemm is known")
    group = declared_group(model, "group_size", settings.get("group_size", settings.get("q_group_size")))
    return AwqReader(tensors, group)


class AwqReader:
    """Reads a checkpoint's AWQ weights; implements ``Reader``. ``group`` is the declared group size, 0 for none."""

    def __init__(self, tensors: Tensors, group: int) -> None:
        self._tensors, self._names, self._group = tensors, set(tensors.names()), group

    def read(self, name: str, shape: tuple[int, ...]) -> Integers | None:
        """Returns the weight ``name`` of ``shape`` (n, k); None if it isn't quantized. Raises CheckpointError if
        its tensors don't fit.
        """
        base = name.removesuffix(".weight")
        if f"{base}.qweight" not in self._names:
            return None
        q, zeros = (in_order(packed_words(self._tensors, f"{base}.{part}")) for part in ("qweight", "qzeros"))
        scales = self._tensors.tensor(f"{base}.scales").float()
        if q.shape != (shape[1], shape[0]) or zeros.shape != scales.shape:
            problem = f"is packed for {tuple(q.T.shape)} and its scales for {tuple(scales.shape)}, not {shape}"
            raise self._tensors.error(f"{base}.qweight", problem)
        require_group(self._tensors, f"{base}.scales", shape[1], len(scales), self._group)
        found = integers(q.T, BITS, scales.T, zeros.T)
        if found is None:
            raise self._tensors.error(
                f"{base}.scales", f"has {len(scales)} groups; use sizes that are multiples of 16"
            )
        return found


def in_order(packed: Tensor) -> Tensor:
    """Returns the numbers (rows, n) int32 packed in ``packed`` (rows, n / 8) int32 in AWQ's order, from 0 up."""
    return unpack(packed, BITS).view(len(packed), -1, 8)[..., PLACES].flatten(-2)
