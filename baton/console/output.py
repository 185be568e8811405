"""How planning commands end: JSON to a file or the terminal, an error of ours as one line and a failing exit code.

Knows nothing of what is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from baton.protos.errors import BatonError, ConfigError

FAILED, INTERRUPTED = 1, 130


def guarded(command: Callable[[], int]) -> int:
    """Run it; what the user can mend becomes one line on stderr."""
    try:
        return command()
    except BatonError as error:
        text = error.message.replace("[", "\\[")
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {text}", soft_wrap=True)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def write_json(target: str | None, value: Any) -> bool:
    """Write ``value`` to the file, or to stdout for "-". Whether stdout is taken: then print nothing else."""
    if target is None:
        return False
    data = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    if target == "-":
        sys.stdout.write(data.decode() + "\n")
        return True
    write_file(target, data)
    return False


def require_place(*targets: str | None) -> None:
    """Raises ConfigError where a file can't be: before minutes are spent on what it is to hold."""
    for target in targets:
        if target and (Path(target).is_dir() or not Path(target).parent.is_dir()):
            raise ConfigError(f"can't write {target}: it must be a file in a folder that is there", "json")


def write_file(target: str, data: bytes) -> None:
    """Raises ConfigError when that can't be."""
    try:
        Path(target).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"can't write {target}: {error}", "json") from error
