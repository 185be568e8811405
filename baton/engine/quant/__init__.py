"""Reads or makes quantized weights; one file per scheme, named as the scheme. Knows nothing of programs.

On load (``--quantization NAME``): the file has ``pack(weight) -> PackedWeight`` and ``pack_head``. In a checkpoint
(``quantization_config.quant_method``): it has ``reader(model, tensors) -> Reader``. An unknown name is refused with
the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.program.stacked import ExpertPart
from baton.kernels.linear.integers import Part
from baton.protos.errors import CheckpointError, ConfigError

NONE = "none"
# What Python, torch and ctypes raise for numbers and shapes that no writer of such a form gives.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
LEAST_GROUP = 16  # inputs that share a scale: the kernels take multiples of it
ON_LOAD = ("int8", "int4")


class Tensors(Protocol):
    """Gives access to a checkpoint's tensors."""

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors."""

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as it is stored. Raises CheckpointError if it is missing."""

    def error(self, name: str, problem: str) -> CheckpointError:
        """Returns an error about tensor ``name`` that also names its file."""


class Reader(Protocol):
    """Reads a quantized checkpoint's weights by the names that they have in a plain one."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | Part | None:
        """Returns the quantized weight ``name`` of ``shape`` (n outputs, k inputs); None if it is stored as a plain
        tensor. Raises CheckpointError.
        """


class ExpertTensors:
    """Gives access to one expert's ``part`` of tensors that hold all experts; implements ``Tensors``."""

    def __init__(self, tensors: Tensors, part: ExpertPart) -> None:
        self._tensors, self._part = tensors, part

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors, which are those of all experts."""
        return self._tensors.names()

    def tensor(self, name: str) -> Tensor:
        """Returns the expert's part of a tensor: of matrices its outputs, of numbers per expert its own one."""
        found = self._tensors.tensor(name)
        if found.dim() == 3:
            error = self.error(name, f"has shape {tuple(found.shape)}, not one of all experts'")
            return self._part.of(found, error).contiguous()
        return found[self._part.expert].reshape(1) if found.dim() == 1 and len(found) > self._part.expert else found

    def error(self, name: str, problem: str) -> CheckpointError:
        """Returns an error about tensor ``name`` that also names its file."""
        return self._tensors.error(name, problem)


def packed_words(tensors: Tensors, name: str) -> Tensor:
    """Returns matrix ``name`` of integers that are packed into int32. Raises CheckpointError for anything else."""
    found = tensors.tensor(name)
    if found.dtype != torch.int32:
        raise tensors.error(name, f"is {found.dtype}, where packed integers are int32; get the model again")
    if found.dim() != 2:
        raise tensors.error(name, f"has shape {tuple(found.shape)}, where a matrix is known; get the model again")
    return found


def declared_group(model: ModelConfig, field: str, value: object) -> int:
    """Returns the inputs per scale that config.json's ``field`` declares; 0 for a whole row, or where it says none.

    Raises CheckpointError for what is no group size.
    """
    if value is None or value == -1:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise model.error(f"quantization_config.{field}", f"is {value!r}; use -1 or a number of inputs")
    return value


def require_group(tensors: Tensors, name: str, k: int, groups: int, declared: int) -> None:
    """Raises CheckpointError unless ``groups`` scales in tensor ``name`` are those of ``k`` inputs in groups of
    ``declared``, which is 0 where nothing is declared.
    """
    if declared and groups * declared != k and not (groups == 1 and declared >= k):
        text = f"has {groups} groups for {k} inputs; quantization_config declares groups of {declared}"
        raise tensors.error(
            name, f"{text}: give the size that the model was quantized with, which must divide them"
        )


def on_load(name: str) -> ModuleType:
    """Returns the module of the scheme that ``--quantization`` names. Raises ConfigError with the choices."""
    if name not in ON_LOAD:
        raise ConfigError(f"quantization {name!r} is unknown; choose {', '.join((NONE, *ON_LOAD))}", "quantization")
    return import_module(f"{__name__}.{name}")


def in_checkpoints() -> tuple[str, ...]:
    """Returns the quantization methods that checkpoints may have, as config.json spells them."""
    files = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    return tuple(name.replace("_", "-") for name in files if name not in ON_LOAD)


def reader_of(model: ModelConfig, tensors: Tensors) -> Reader | None:
    """Returns the reader of a checkpoint's quantized weights; None for a plain checkpoint. Raises CheckpointError
    for an unknown method or setting.
    """
    settings = model.fields.get("quantization_config") or model.fields.get("compression_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method not in in_checkpoints() or method == "gguf":
        choices = ", ".join(in_checkpoints())
        raise model.error("quantization_config.quant_method", f"is {method!r}; known are {choices}")
    try:
        return import_module(f"{__name__}.{method.replace('-', '_')}").reader(model, tensors)  # type: ignore[no-any-return]
    except UNREADABLE as error:
        text = f"can't be read ({_in_short(error)}); get config.json again from where the model is from"
        raise model.error("quantization_config", text) from error


def unreadable(error: Exception) -> str:
    """Returns what is to be said of a tensor over which a reader failed by ``error``, one of UNREADABLE."""
    return f"or what is stored beside it isn't as its form has it ({_in_short(error)}); get the model again"


def _in_short(error: Exception) -> str:
    return f"{error}".partition("\n")[0][:120]
