"""Output of planning commands: JSON to a file or the terminal, errors as one line and a failing exit code.

Knows nothing of what is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import orjson
from rich.console import Console

from baton.process.output_files import write_file
from baton.protos.errors import BatonError

FAILED, INTERRUPTED = 1, 130  # exit statuses; 130 is a shell's for SIGINT


def guarded(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; a BatonError is printed as one line on stderr and returns
    FAILED.
    """
    try:
        return command()
    except BatonError as error:
        text = error.message.replace("[", "\\[")
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {text}", soft_wrap=True)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def write_json(target: str | None, value: object) -> bool:
    """Writes ``value`` as JSON to file ``target``, or to stdout for "-"; None writes nothing.

    Returns whether stdout was written to: then nothing else may be printed there.
    """
    if target is None:
        return False
    data = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    if target == "-":
        sys.stdout.write(data.decode() + "\n")
        return True
    write_file(target, data)
    return False
