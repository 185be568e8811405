"""MXFP4 experts as gpt-oss checkpoints have them (OCP Microscaling Formats v1.0).

Knows nothing of models. Beside a stacked tensor's name (``program/stacked.py``) lie
    NAME_blocks uint8 (experts, outputs, inputs / 32, 16), two E2M1 numbers a byte, the first in the low four bits
    NAME_scales uint8 (experts, outputs, inputs / 32), powers of two
Everything else in such a checkpoint is plain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.program.stacked import ExpertPart, part_of
from baton.engine.quant import Reader, Tensors
from baton.engine.quant.compressed_tensors import BIAS, NAN
from baton.kernels.linear.codes import Codes, e2m1, nibbles

GROUP = 32  # inputs that share a scale


def reader(model: ModelConfig, tensors: Tensors) -> Reader:
    """Returns a reader of the checkpoint's MXFP4 experts."""
    return Mxfp4Reader(tensors)


class Mxfp4Reader:
    """Reads a checkpoint's MXFP4 experts; implements ``Reader``."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._names = tensors, set(tensors.names())

    def read(self, name: str, shape: tuple[int, ...]) -> Codes | None:
        """Returns the expert's matrix ``name`` of ``shape`` (n, k); None if it isn't stored as blocks. Raises
        CheckpointError if its tensors don't fit.
        """
        tensor, part = part_of(name)
        if part is None or f"{tensor}_blocks" not in self._names:
            return None
        blocks, scales = (self._part(f"{tensor}_{end}", part, dim) for end, dim in (("blocks", 4), ("scales", 3)))
        if bool((scales == NAN).any()):
            raise self._tensors.error(f"{tensor}_scales", "holds NaN; it is damaged, get the model again")
        rows = nibbles(blocks.flatten(1))
        if tuple(rows.shape) != shape or tuple(scales.shape) != (shape[0], shape[1] // GROUP):
            text = f"is packed for {tuple(rows.shape)}, config.json asks for {shape}"
            raise self._tensors.error(f"{tensor}_blocks", text)
        return e2m1(rows, GROUP, torch.exp2(scales.float() - BIAS))

    def _part(self, name: str, part: ExpertPart, dims: int) -> Tensor:
        found = self._tensors.tensor(name)
        if found.dtype != torch.uint8 or found.dim() != dims or part.expert >= len(found):
            text = f"is {found.dtype} {tuple(found.shape)}; all experts' bytes in {dims} dimensions are known"
            raise self._tensors.error(name, text)
        return found[part.expert][part.outputs(found.shape[1])].contiguous()
