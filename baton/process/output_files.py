"""Files that a command writes at its end; that they can be written is checked before it begins.

Knows nothing of what they hold.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from baton.protos.errors import ConfigError

PLOTS = (".png", ".svg")  # formats of pictures


def require_place(*targets: str | None) -> None:
    """Raises ConfigError if one of the paths is a folder or its folder doesn't exist; None is skipped."""
    for target in targets:
        if target and (Path(target).is_dir() or not Path(target).parent.is_dir()):
            raise ConfigError(f"can't write {target}: it must be a file in a folder that is there", "json")


def unwritable(folder: Path) -> str:
    """Returns why ``folder`` can't be made or written, in words; "" if it can be. Raises OSError where that can't
    be told.
    """
    there = next(at for at in (folder, *folder.absolute().parents) if at.exists())
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK) else f"{there} can't be written"


def require_plot(path: str | None) -> None:
    """Raises ConfigError if no plot can be written to ``path``: it isn't .png or .svg, its folder doesn't exist,
    or matplotlib is missing. None is skipped.
    """
    if path is None:
        return
    require_place(path)
    if Path(path).suffix not in PLOTS:
        raise ConfigError(f"{path}: a plot is a {' or a '.join(PLOTS)} file", "plot")
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib", "plot")


def write_file(target: str, data: bytes) -> None:
    """Writes ``data`` to the file ``target``. Raises ConfigError if that fails."""
    try:
        Path(target).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"can't write {target}: {error}", "json") from error
