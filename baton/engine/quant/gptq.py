"""GPTQ checkpoints (https://arxiv.org/abs/2210.17323), as AutoGPTQ and GPTQModel write them: 4 or 8 bits.

Knows nothing of models. Per linear layer: qweight int32 (k / per, n), inputs packed from the low bits up;
scales (groups, n); qzeros int32 (groups, n / per), zero - 1 ("gptq") or zero ("gptq_v2"); g_idx (k,), each input's
group. Where g_idx isn't in order (desc_act), neighbours don't share a scale: such layers are rounded anew to 8 bits
in groups of 32, a tenth of the error that 4 bits have already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.quant import Reader, Tensors
from baton.kernels.linear.integers import Integers
from baton.kernels.linear.packed import quantize
from baton.protos.errors import CheckpointError

REGROUPED = 32


def reader(model: ModelConfig, tensors: Tensors) -> Reader:
    """Checks the settings. Raises CheckpointError naming the one that isn't known."""
    settings = model.fields["quantization_config"]
    bits, form = settings.get("bits"), settings.get("checkpoint_format", "gptq")
    if bits not in (4, 8):
        raise model.error("quantization_config.bits", f"is {bits!r}; GPTQ with 4 or 8 bits is known")
    if form not in ("gptq", "gptq_v2"):
        raise model.error("quantization_config.checkpoint_format", f"is {form!r}; gptq and gptq_v2 are known")
    return GptqReader(tensors, bits, 0 if form == "gptq_v2" else 1)


class GptqReader:
    """Implements ``Reader``."""

    def __init__(self, tensors: Tensors, bits: int, offset: int) -> None:
        self._tensors, self._bits, self._offset = tensors, bits, offset
        self._names = set(tensors.names())

    def read(self, name: str, shape: tuple[int, ...]) -> Integers | None:
        """The layer of ``name``; None where it isn't quantized."""
        base = name.removesuffix(".weight")
        if f"{base}.qweight" not in self._names:
            return None
        q = unpack(self._tensors.tensor(f"{base}.qweight").T, self._bits).T  # (k, n)
        zeros = unpack(self._tensors.tensor(f"{base}.qzeros"), self._bits) + self._offset  # (groups, n)
        scales = self._tensors.tensor(f"{base}.scales").float()
        if q.shape != (shape[1], shape[0]) or scales.shape[1] != shape[0] or zeros.shape != scales.shape:
            raise CheckpointError(f"tensor {base}.qweight is packed for {tuple(q.T.shape)}, not {shape}", "model")
        order = self._order(base, shape[1], len(scales))
        if order is not None:
            return regrouped((scales[order] * (q - zeros[order])).T)
        return integers(q.T, self._bits, scales.T, zeros.T)

    def _order(self, base: str, k: int, groups: int) -> Tensor | None:
        """Each input's group, None where they are in order."""
        if f"{base}.g_idx" not in self._names:
            return None
        found = self._tensors.tensor(f"{base}.g_idx").long()
        plain = torch.arange(k) // -(-k // groups)
        return None if torch.equal(found, plain) else found


def integers(q: Tensor, bits: int, scales: Tensor, zeros: Tensor) -> Integers:
    """q (n, k) from 0 up, scales and zeros (n, groups) -> around the middle; mins where a zero isn't there."""
    half = 1 << (bits - 1)
    group = -(-q.shape[1] // scales.shape[1])
    if group % 16 and scales.shape[1] > 1:
        raise CheckpointError(f"groups of {group} inputs are not known; they must be a multiple of 16", "model")
    mins = None if bool((zeros == half).all()) else scales * (zeros - half)
    return Integers(
        (q - half).to(torch.int8), bits, 0 if scales.shape[1] == 1 else group, scales.contiguous(), mins
    )


def regrouped(weight: Tensor) -> Integers:
    """Rounded to 8 bits in small groups."""
    found = quantize(weight.contiguous(), 8, REGROUPED)
    assert found.scales is not None
    assert found.row_scale is not None
    n = found.n
    scales = found.scales.float().transpose(1, 2).reshape(-1, found.scales.shape[1])[:n] * found.row_scale[:n, None]
    return Integers(found.integers(), 8, REGROUPED, scales)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """(rows, columns) int32 -> (rows, columns x 32 / bits) int32, from the low bits up."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)
