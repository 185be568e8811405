"""The unquantized checkpoint: its program, and its weights, which are read one by one.

Knows nothing of rounding. Weights are read when needed, so that a model larger than memory can be quantized. Files
are mapped; the pages that were read count as this process's memory until ``release`` unmaps them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.checkpoints.hub import locate
from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.program import Weight
from baton.engine.program.stacked import own_source, part_of
from baton.gguf_files.folder import is_gguf
from baton.protos.errors import ConfigError
from baton.quantize.layers import require_known
from baton.quantize.tensor_file import PiecewiseTensor

PIECE_BYTES = 16 << 20  # of a tensor that is copied as it is
QUANTIZED = ("quantization_config", "compression_config")


class Source:
    """An unquantized checkpoint, read weight by weight.

    Raises CheckpointError if it can't be read, ConfigError if it is quantized already.
    """

    def __init__(self, model: str) -> None:
        if is_gguf(model):
            text = f"{model}: a GGUF file can't be quantized further; start from a checkpoint in safetensors"
            raise ConfigError(text, "model")
        self.directory: Path = locate(model)
        self.config = ModelConfig.read(self.directory)
        if any(self.config.fields.get(field) for field in QUANTIZED):
            text = f"{self.config.path}: the checkpoint is quantized already; start from the plain one"
            raise ConfigError(text, "model")
        self.program = program_for(self.config)
        require_known(self.program)
        self.weights = {weight.name: weight for weight in self.program.weights}
        self._files = Checkpoint(self.directory)

    def stored(self, name: str) -> list[Tensor]:
        """Returns the tensors of weight ``name`` as in the files; a fused weight has several, a constant none."""
        weight = self.weights[name]
        if not weight.sources:
            return []
        return [self._files.tensor(at, shape) for at, shape in zip(weight.sources, weight.shapes, strict=True)]

    def copied(self, name: str) -> dict[str, PiecewiseTensor]:
        """Returns the tensors of weight ``name`` as in the files, by name, in pieces that are read when they are
        asked for and unmapped before the next. Of a tensor that holds all experts' parts it is the whole.
        """
        weight, stored = self.weights[name], dict[str, Tensor]()
        for source, shape in zip(weight.sources, weight.shapes, strict=False):  # a constant has a shape alone
            at, whole = self._file_name(source)
            stored[at] = self._files.tensor(at, None if whole else shape)
        return {
            at: PiecewiseTensor(part.dtype, tuple(part.shape), self._pieces(at, tuple(part.shape), part.dtype))
            for at, part in stored.items()
        }

    def _file_name(self, source: str) -> tuple[str, bool]:
        """Returns the name of the tensor that has ``source``, and whether it has other experts' parts too."""
        tensor, part = part_of(source)
        own = None if part is None or tensor in self._files.names() else own_source(source)
        return own or tensor, part is not None and own is None

    def rows(self, name: str, ids: Sequence[int]) -> Tensor:
        """Returns rows ``ids`` of weight ``name``, which has one tensor, in float32."""
        found = self.stored(name)[0][torch.tensor(ids)].float()
        self.release()
        return found

    def release(self) -> None:
        """Unmaps the files; tensors of ``stored`` that somebody holds keep their file mapped."""
        self._files.release()

    def _pieces(self, at: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        step = max(1, PIECE_BYTES * shape[0] // (dtype.itemsize * math.prod(shape)))
        for first in range(0, shape[0], step):
            yield self._files.rows(at, shape, first, min(first + step, shape[0]))
            self.release()

    def wide(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns the weights ``names`` in float32 as ops read them, each with its tensors concatenated along the
        rows.
        """
        return {name: self._wide(self.weights[name]) for name in names}

    def _wide(self, weight: Weight) -> Tensor:
        if not weight.sources:
            return torch.full(weight.shapes[0], weight.plus)
        rows = [shape[0] for shape in weight.shapes]
        found = torch.empty(sum(rows), *weight.shapes[0][1:])
        for part, stored in zip(found.split(rows), self.stored(weight.name), strict=True):
            part.copy_(stored)
        return found.add_(weight.plus).mul_(weight.times) if weight.is_changed else found

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which the files hold weight ``name``; float32 if they don't hold it."""
        return next((part.dtype for part in self.stored(name)), torch.float32)

    def fingerprint(self) -> str:
        """Returns a hash that identifies this checkpoint."""
        return self._files.fingerprint(self.config.fields)
