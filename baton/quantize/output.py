"""The folder that a quantized checkpoint is written to, in a file per layer, so that an interrupted run can resume.

Knows nothing of rounding. A layer's file appears complete or not at all; the registers that calibration needs
between layers are kept under ``.work`` until the end, which writes index and config and deletes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from safetensors import safe_open

from baton.engine.checkpoints.safetensors import INDEX
from baton.process.output_files import unwritable
from baton.protos.errors import ConfigError
from baton.protos.json import Json
from baton.quantize.layers import States
from baton.quantize.tensor_file import PiecewiseTensor, write_tensors

WORK, ASKED = ".work", "asked.json"
COPIED = ("*.json", "*.jinja", "tokenizer*", "LICENSE*")
SKIPPED = ("config.json", INDEX, "quantize_config.json")


# Errors that room on the disk mends; numpy's writes say none.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raises ConfigError, which names the remedy, for whatever in its block can't be written in ``folder``.

    An OSError about a path elsewhere is passed on.
    """
    try:
        yield
    except shutil.Error as error:  # of a copied folder: (source, copy, reason) of each file
        reason = "; ".join(str(why) for _, _, why in error.args[0])
        raise _refused(folder, reason, full=True) from error
    except OSError as error:
        if error.filename is not None and not _is_of(folder, Path(os.fsdecode(error.filename))):
            raise
        raise _refused(folder, error.strerror or str(error), full=error.errno in FULL) from error


def _is_of(folder: Path, path: Path) -> bool:
    """Returns whether ``path`` is the folder, something in it, or what it lies in."""
    return path == folder or folder in path.parents or path in folder.parents


def _refused(folder: Path, reason: str, full: bool) -> ConfigError:
    remedy = "make room there; the same command goes on after the layers that are finished"
    return ConfigError(f"can't write to {folder}: {reason}: {remedy if full else 'name another --out'}", "out")


def _require_same(folder: Path, asked: Json, before: Json) -> None:
    if other := next((name for name in asked if before.get(name) != asked[name]), None):
        text = f"{folder} was begun with another {other}: remove it, or name another --out"
        raise ConfigError(text, "out")


class OutputFolder:
    """A checkpoint of ``parts`` files in ``folder``; the first file holds what is outside of the layers."""

    def __init__(self, folder: Path, parts: int) -> None:
        self.folder, self.parts = folder, parts
        self.work = folder / WORK

    def begin(self, asked: Json) -> bool:
        """Prepares the folder for the settings ``asked``; returns whether an interrupted run is resumed.

        Raises ConfigError as ``require_usable`` does.
        """
        self.require_usable(asked)
        path = self.work / ASKED
        if path.exists():
            return True
        self.work.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(asked))
        return False

    def require_usable(self, asked: Json) -> None:
        """Raises ConfigError if the folder holds anything but a run that was begun with the settings ``asked``, or
        if it can't be made or written. Nothing is written.
        """
        with writing_to(self.folder):
            if (path := self.work / ASKED).exists():
                _require_same(self.folder, asked, msgspec.json.decode(path.read_bytes(), type=Json))
            elif self.folder.exists() and any(self.folder.iterdir()):
                raise ConfigError(f"{self.folder} isn't empty: name another --out", "out")
            if why := unwritable(self.folder):
                raise _refused(self.folder, why, full=False)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other runs away from the folder, which has begun, for as long as the block runs.

        Raises ConfigError if another run holds it. On file systems without locks nobody is kept away.
        """
        with (self.work / ASKED).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                text = f"another run is writing to {self.folder}: wait for it, or name another --out"
                raise ConfigError(text, "out") from error
            except OSError:
                pass
            yield

    def path(self, part: int) -> Path:
        """Returns the path of the file of part ``part``."""
        return self.folder / f"model-{part + 1:05d}-of-{self.parts:05d}.safetensors"

    def has(self, part: int) -> bool:
        """Returns whether the file of part ``part`` is written."""
        return self.path(part).exists()

    def write(self, part: int, tensors: Mapping[str, PiecewiseTensor]) -> None:
        """Writes the file of part ``part`` atomically."""
        path = self.path(part).with_suffix(".new")
        write_tensors(path, tensors)
        os.replace(path, self.path(part))

    def keep(self, states: States, layer: int) -> None:
        """Stores a copy of ``states``, the input of layer ``layer``, and deletes those of other layers."""
        part = self.work / "next"
        states.copy(part)
        shutil.rmtree(self.kept(layer), ignore_errors=True)  # of a run that was stopped here
        os.replace(part, self.kept(layer))
        for path in self.work.glob("layer-*"):
            if path != self.kept(layer):
                shutil.rmtree(path)

    def kept(self, layer: int) -> Path:
        """Returns the folder of the stored input of layer ``layer``."""
        return self.work / f"layer-{layer:05d}"

    def end(self, source: Path, config: Json) -> None:
        """Writes the index and config.json, copies the tokenizer and other small files from ``source``, and deletes
        ``.work``.
        """
        places: dict[str, str] = {}
        size = 0
        for part in range(self.parts):
            with safe_open(str(self.path(part)), framework="pt") as file:
                places |= dict.fromkeys(file.keys(), self.path(part).name)
            size += self.path(part).stat().st_size
        for pattern in COPIED:
            for path in source.glob(pattern):
                if path.name not in SKIPPED and path.is_file():
                    shutil.copyfile(path, self.folder / path.name)
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (self.folder / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)))
        (self.folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        shutil.rmtree(self.work)
