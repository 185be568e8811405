"""Findings of ``baton check`` and ``baton doctor``: printed as lines or JSON, and the exit code.

Knows nothing of what was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.markup import escape

from baton.protos.errors import BatonError, ConfigError

State = Literal["ok", "warn", "fail", "skip"]
MARKS = {"ok": "[green]ok[/]  ", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]", "skip": "[dim]skip[/]"}


class Finding(msgspec.Struct, frozen=True):
    """Describes one check's result: ``what`` was seen of ``subject``; ``remedy`` says what to do unless it is "ok".

    ``state`` "skip": not checked.
    """

    subject: str
    state: State
    what: str
    remedy: str = ""


def tried(key: str, check: Callable[[], object]) -> Finding:
    """Returns the finding of ``check``, which returns what it saw (a string, else it is just known) or raises
    BatonError; OSError or RuntimeError where a place can't be looked at, or is in the home of no user.
    """
    try:
        found = check()
    except BatonError as error:
        return Finding(key, "fail", error.message, remedy_of(error))
    except OSError as error:
        return Finding(key, "fail", f"{error.filename}: {error.strerror}")
    except RuntimeError as error:  # pathlib's, of "~NAME"
        return Finding(key, "fail", f"{error}")
    return Finding(key, "ok", found if isinstance(found, str) else "known")


def remedy_of(error: BatonError) -> str:
    """Returns the remedy for an error; "" if its message has one: those of ours end with it."""
    return "" if ":" in error.message or ";" in error.message else "docs/configuration.md has every key"


def require_none_failed(findings: Iterable[Finding]) -> None:
    """Raises ConfigError for the first of ``findings`` that failed, with its remedy."""
    for found in findings:
        if found.state == "fail":
            remedy = f"; {found.remedy}" if found.remedy else ""
            raise ConfigError(f"{found.subject}: {found.what}{remedy}", found.subject)


def exit_code(findings: Sequence[Finding]) -> int:
    """Returns 1 if any finding's state is "fail", else 0."""
    return int(any(finding.state == "fail" for finding in findings))


def show(findings: Sequence[Finding], as_json: bool) -> int:
    """Prints the findings, as lines or JSON; returns the exit code."""
    code = exit_code(findings)
    if as_json:
        print(msgspec.json.encode({"ok": code == 0, "findings": findings}).decode())
        return code
    console = Console(highlight=False, soft_wrap=True)
    width = max((len(finding.subject) for finding in findings), default=0)
    for finding in findings:
        console.print(f"{MARKS[finding.state]}  {finding.subject:<{width}}  {escape(finding.what)}")
        if finding.remedy and finding.state in ("warn", "fail"):
            console.print(f"      {'':<{width}}  [dim]->[/] {escape(finding.remedy)}")
    return code
