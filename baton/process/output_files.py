"""Files that a command writes at its end; that they can be written is checked before it begins.

Knows nothing of what they hold.
"""

from __future__ import annotations

from pathlib import Path

from baton.protos.errors import ConfigError


def require_place(*targets: str | None) -> None:
    """Raises ConfigError if one of the paths is a folder or its folder doesn't exist; None is skipped."""
    for target in targets:
        if target and (Path(target).is_dir() or not Path(target).parent.is_dir()):
            raise ConfigError(f"can't write {target}: it must be a file in a folder that is there", "json")


def write_file(target: str, data: bytes) -> None:
    """Writes ``data`` to the file ``target``. Raises ConfigError if that fails."""
    try:
        Path(target).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"can't write {target}: {error}", "json") from error
