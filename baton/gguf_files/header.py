"""Reads what a GGUF file says beside its tensors (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Knows nothing of models or of tokenizers. The ``gguf`` package parses the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baton.protos.errors import CheckpointError


class GgufHeader:
    """Holds a file's fields by name, and its tensors' names and shapes. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader

            self._reader = GGUFReader(path)
        except ImportError:
            raise CheckpointError(
                f"{path}: reading GGUF needs the gguf package: pip install gguf", "model"
            ) from None
        except Exception as error:  # the package raises whatever its parsing runs into
            raise CheckpointError(f"{path} is damaged or no GGUF: {error}", "model") from error
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def architecture(self) -> str:
        """Returns the name of the architecture as llama.cpp has it."""
        return self.text("general.architecture")

    def has_tensor(self, name: str) -> bool:
        """Tells whether the file has a tensor of that name."""
        return name in self._tensors

    def rows_of(self, name: str) -> int | None:
        """Returns the first dimension of a tensor as a model counts it; None for a missing one."""
        found = self._tensors.get(name)
        return None if found is None else int(found.shape[-1])

    def floats(self, name: str) -> NDArray[np.float32] | None:
        """Returns a small float32 tensor; None for a missing one."""
        found = self._tensors.get(name)
        return None if found is None else np.array(found.data, np.float32).reshape(-1)

    def of_model(self, name: str, default: object = None) -> object:
        """Returns the field ``name`` of the architecture, such as ``block_count``."""
        return self.value(f"{self.architecture}.{name}", default)

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a whole number above 0 of the architecture. Raises CheckpointError by name."""
        found = self.of_model(name, default)
        if isinstance(found, list) and len(set(found)) == 1:  # as many per layer, said for each
            found = found[0]
        if not isinstance(found, int) or found < 1:
            raise self.error(f"{self.architecture}.{name}", f"is {found!r}; one number above 0 is known")
        return found

    def number(self, name: str, default: float) -> float:
        """Returns a number of the architecture. Raises CheckpointError by name."""
        found = self.of_model(name, default)
        if not isinstance(found, int | float):
            raise self.error(f"{self.architecture}.{name}", f"is {found!r}; a number is known")
        return float(found)

    def text(self, name: str, default: str | None = None) -> str:
        """Returns a field's text. Raises CheckpointError by name."""
        found = self.value(name, default)
        if not isinstance(found, str):
            raise self.error(name, f"is {found!r}; a text is known")
        return found

    def items(self, name: str) -> list[object]:
        """Returns a field's list, empty where it is missing."""
        found = self.value(name, [])
        if not isinstance(found, list):
            raise self.error(name, "must be a list")
        return found

    def value(self, name: str, default: object = None) -> object:
        """Returns a field as Python has it: a number, a text, a flag or a list of them."""
        fields: Mapping[str, object] = self._reader.fields
        found = fields.get(name)
        return default if found is None else found.contents()  # type: ignore[attr-defined]

    def error(self, name: str, problem: str) -> CheckpointError:
        """Returns an error about one field, with its file."""
        return CheckpointError(f"{self.path}: {name} {problem}", "model")
