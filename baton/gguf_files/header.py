"""Reads the header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Knows nothing of models or of tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baton.gguf_files.parts import GgufFiles
from baton.protos.errors import CheckpointError


class GgufHeader:
    """A GGUF file's fields by name, and its tensors' names and shapes, those of all its parts.

    Raises CheckpointError if it can't be parsed.
    """

    def __init__(self, path: Path) -> None:
        files = GgufFiles(path)
        self.path = path
        self._fields: Mapping[str, object] = files.fields
        self._tensors = files.tensors

    @property
    def architecture(self) -> str:
        """Returns the name of the architecture in llama.cpp's spelling. Raises CheckpointError if the file has
        none.
        """
        return self.text("general.architecture")

    def has_tensor(self, name: str) -> bool:
        """Returns whether the file has a tensor named ``name``."""
        return name in self._tensors

    def rows_of(self, name: str) -> int | None:
        """Returns the first dimension of tensor ``name`` in PyTorch's order of dimensions; None if there is no such
        tensor.
        """
        found = self._tensors.get(name)
        return None if found is None else int(found.shape[-1])

    def floats(self, name: str) -> NDArray[np.float32] | None:
        """Returns float32 tensor ``name``, flattened; None if there is no such tensor."""
        found = self._tensors.get(name)
        return None if found is None else np.array(found.data, np.float32).reshape(-1)

    def of_model(self, name: str, default: object = None) -> object:
        """Returns the field "ARCHITECTURE.``name``", such as ``block_count``; ``default`` if it is missing."""
        return self.value(f"{self.architecture}.{name}", default)

    def size(self, name: str, default: int | None = None) -> int:
        """Returns the architecture's field ``name``, a positive integer. Raises CheckpointError if it is anything
        else.

        A list of equal numbers, one per layer, counts as that number.
        """
        found = self.of_model(name, default)
        if isinstance(found, list) and len(set(found)) == 1:  # as many per layer, said for each
            found = found[0]
        if not isinstance(found, int) or found < 1:
            raise self.error(f"{self.architecture}.{name}", f"is {found!r}; one number above 0 is known")
        return found

    def number(self, name: str, default: float) -> float:
        """Returns the architecture's field ``name`` as a float. Raises CheckpointError if it isn't a number."""
        found = self.of_model(name, default)
        if not isinstance(found, int | float):
            raise self.error(f"{self.architecture}.{name}", f"is {found!r}; a number is known")
        return float(found)

    def text(self, name: str, default: str | None = None) -> str:
        """Returns the text of field ``name``. Raises CheckpointError if it isn't a text."""
        found = self.value(name, default)
        if not isinstance(found, str):
            raise self.error(name, f"is {found!r}; a text is known")
        return found

    def items(self, name: str) -> list[object]:
        """Returns the list in field ``name``, [] if it is missing. Raises CheckpointError if it isn't a list."""
        found = self.value(name, [])
        if not isinstance(found, list):
            raise self.error(name, "must be a list")
        return found

    def value(self, name: str, default: object = None) -> object:
        """Returns field ``name`` as a number, a text, a bool or a list of them; ``default`` if it is missing."""
        found = self._fields.get(name)
        return default if found is None else found.contents()  # type: ignore[attr-defined]

    def error(self, name: str, problem: str) -> CheckpointError:
        """Returns an error that names the file, the field ``name`` and the ``problem``."""
        return CheckpointError(f"{self.path}: {name} {problem}", "model")
