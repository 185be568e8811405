"""Output of planning commands: JSON to a file or the terminal, errors as one line and a failing exit code.

Knows nothing of what is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.process.output_files import write_file
from baton.protos.errors import BatonError

ENDLESS = 100_000  # columns: more than any line of results has
FAILED, INTERRUPTED = 1, 130  # exit statuses; 130 is a shell's for SIGINT


def results() -> Console:
    """Returns the console that results are printed on: as wide as the terminal, and without end where stdout is a
    file or a pipe, so that no line is wrapped there and no cell of a table is cut.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = ENDLESS
    return console


def print_table(table: Table) -> None:
    """Prints a table of results, whole: what a terminal has no room for goes on in the next line of its cell."""
    results().print(whole(table))


def whole(table: Table) -> Table:
    """Returns ``table`` with columns that break what has no room instead of cutting it."""
    for column in table.columns:
        column.no_wrap, column.overflow = False, "fold"
    return table


def guarded(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; a BatonError is printed as one line on stderr and returns
    FAILED.
    """
    try:
        return command()
    except BatonError as error:
        print_error(error.message)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def print_error(message: str) -> None:
    """Prints one line on stderr that says what is wrong; ``message`` stays as it is, brackets and colons too."""
    console = Console(stderr=True, highlight=False)
    console.print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)


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
