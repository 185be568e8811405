"""Reads the files of draft heads that were trained for a model: config.json and safetensors, as they are published.

Knows nothing of what the tensors mean. Pickled files are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.checkpoints.hub import locate
from baton.engine.program.config import ModelConfig
from baton.kernels.linear.packed import PackedWeight, pack_bf16, quantize
from baton.protos.errors import CheckpointError

# Bits, and inputs that share a scale (0: all), as the engine has them of weights that it quantizes on load.
QUANTIZED = {"int8": (8, 0), "int4": (4, 32)}
Matrix = Tensor | PackedWeight
Packing = Callable[[Tensor], Matrix]


class Target(NamedTuple):
    """Holds the properties of the target model that heads must fit."""

    hidden: int  # size of a hidden state
    vocab: int  # number of token ids
    layers: int  # number of layers


class HeadFiles:
    """Reads the config and the tensors of one directory or hub id. Raises CheckpointError if they can't be read."""

    def __init__(self, model: str) -> None:
        self.directory = locate(model)
        self.config = ModelConfig.read(self.directory)
        self._at = {name: file for path in _tensor_files(self.directory) for file, name in _names(path)}

    @property
    def names(self) -> Iterable[str]:
        """Returns the names of all tensors."""
        return self._at.keys()

    def first_of(self, *names: str) -> str:
        """Returns the first of ``names`` that exists. Raises CheckpointError naming the first if none does."""
        found = next((name for name in names if name in self._at), None)
        if found is None:
            raise self.error(names[0], "is missing")
        return found

    def floats(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor as float32. Raises CheckpointError if it is missing, isn't of floats or has another
        shape.
        """
        found = self.tensor(name)
        if tuple(found.shape) != shape or not found.dtype.is_floating_point:
            raise self.error(name, f"is {found.dtype} {tuple(found.shape)}; floats of shape {shape} are needed")
        return found.float()

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as it is stored. Raises CheckpointError if it is missing."""
        if name not in self._at:
            raise self.error(name, "is missing")
        with safe_open(str(self._at[name]), framework="pt", device="cpu") as file:
            return file.get_tensor(name)

    def error(self, name: str, problem: str) -> CheckpointError:
        """Returns an error about tensor ``name`` that names the directory."""
        return CheckpointError(f"{self.directory}: tensor {name} {problem}", "speculation")


def packing(dtype: str, quantization: str, activations: str = "auto") -> Packing:
    """Returns the function that packs matrices of heads, in the form of the target's own weights, for the same
    ``activations``.
    """
    if quantization in QUANTIZED:
        bits, group = QUANTIZED[quantization]
        if activations == "bf16":
            return lambda weight: quantize(weight, bits, group).with_bf16_rows()
        return lambda weight: quantize(weight, bits, group)
    if dtype == "bfloat16":
        return lambda weight: pack_bf16(weight.to(torch.bfloat16))
    return lambda weight: weight


def _tensor_files(directory: Path) -> list[Path]:
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        pickled = ", ".join(sorted(p.name for p in directory.iterdir() if p.suffix in (".pt", ".bin", ".pth")))
        why = f"; {pickled} would have to be unpickled: convert it to safetensors" if pickled else ""
        raise CheckpointError(f"{directory} holds no *.safetensors{why}", "speculation")
    return found


def _names(path: Path) -> list[tuple[Path, str]]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return [(path, name) for name in file.keys()]  # noqa: SIM118  # it is no mapping
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}", "speculation") from error
