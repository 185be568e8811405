"""Finds and opens the files of a GGUF model: one, or the parts that llama-gguf-split made of it, side by side.

Knows nothing of models, nor of what tensors hold. The ``gguf`` package parses each file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from baton.protos.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)\Z", re.IGNORECASE)  # how its name ends


def names_of(name: str) -> list[str]:
    """Returns the names of all parts, in order, of the model that file ``name`` belongs to.

    It is ``name`` alone, unless that says that it is a part (NAME-00001-of-00003.gguf).
    """
    found = PART.search(name)
    if found is None:
        return [name]
    numbers = range(1, max(int(found["count"]), int(found["number"])) + 1)
    return [f"{name[: found.start()]}-{number:05}-of-{found['count']}{found['suffix']}" for number in numbers]


def paths_of(path: Path) -> list[Path]:
    """Returns the paths of all parts of the model that ``path`` belongs to. Raises CheckpointError naming one that
    isn't there.
    """
    found = [path.with_name(name) for name in names_of(path.name)]
    for part in found:
        if not part.is_file():
            beside = "" if len(found) == 1 else f"; all {len(found)} parts of a model lie side by side"
            raise CheckpointError(f"{part}: there is no such file{beside}", "model")
    return found


class GgufFiles:
    """The files of a model, opened: the first one's fields, and the tensors of all of them by name.

    Raises CheckpointError if one can't be parsed, or isn't the part that its name says.
    """

    def __init__(self, path: Path) -> None:
        self.paths = paths_of(path)
        readers = [_opened(each) for each in self.paths]
        self.fields = readers[0].fields
        self.tensors: dict[str, ReaderTensor] = {}
        self._homes: dict[str, Path] = {}
        for number, (each, reader) in enumerate(zip(self.paths, readers, strict=True)):
            self._require_part(each, reader, number)
            for tensor in reader.tensors:
                if tensor.name in self.tensors:
                    raise CheckpointError(
                        f"{each}: tensor {tensor.name} is in {self.home(tensor.name)} too", "model"
                    )
                self.tensors[tensor.name], self._homes[tensor.name] = tensor, each
        wanted = _number(readers[0], "split.tensors.count", len(self.tensors))
        if wanted != len(self.tensors):
            text = f"its parts have {len(self.tensors)} tensors together, split.tensors.count is {wanted}"
            raise CheckpointError(f"{self.paths[0]}: {text}; fetch all parts anew", "model")

    def home(self, tensor: str) -> Path:
        """Returns the path of the file that holds ``tensor``."""
        return self._homes[tensor]

    def _require_part(self, path: Path, reader: GGUFReader, number: int) -> None:
        """Checks that the header says what the name does: how many parts there are, and which one this is."""
        count, own = _number(reader, "split.count", 1), _number(reader, "split.no", 0)
        if max(count, 1) == len(self.paths) and own == number:
            return
        text = f"is part {own + 1} of {count} by its header, {number + 1} of {len(self.paths)} by its name"
        named = "name parts as llama-gguf-split does (NAME-00001-of-00003.gguf), side by side"
        raise CheckpointError(f"{path} {text}; {named}", "model")


def _number(reader: GGUFReader, name: str, default: int) -> int:
    found = reader.fields.get(name)
    value = default if found is None else found.contents()
    return value if isinstance(value, int) else default


def _opened(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader

        return GGUFReader(path)
    except ImportError:
        raise CheckpointError(f"{path}: reading GGUF needs the gguf package: pip install gguf", "model") from None
    except Exception as error:  # the package raises whatever its parsing runs into
        size = path.stat().st_size
        raise CheckpointError(f"{path} is damaged or no GGUF ({size} bytes): {error}", "model") from error
