"""Breakpoints of the cache: where a client says that a prefix ends which it will send again (``cache_control``).

Knows nothing of templates or tokens. https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from baton.protos.json import Json

HOUR, MINUTES = "1h", "5m"  # the times to live that there are; the second is the default


class Breakpoint(NamedTuple):
    """Stands behind ``chars`` characters of the content of message number ``message``; None: behind all of them."""

    message: int
    chars: int | None
    ttl: str


class Marks(list[Json]):
    """Is a list of ``mark_of``'s results, of a type that no client's JSON has."""


def mark_of(given: object, chars: int | None = None) -> Json:
    """Returns a client's ``cache_control`` as it is kept on a message: its time to live, and how many characters of
    the content it stands behind; None for all.

    What is no such object counts as one with the default time to live, because it is a hint alone.
    """
    ttl = given.get("ttl") if isinstance(given, dict) else None
    return {"ttl": HOUR if ttl == HOUR else MINUTES, "chars": chars}


def breakpoints_of(marks: Iterable[object]) -> list[Breakpoint]:
    """Returns the last breakpoint of each time to live; ``marks`` has what each message keeps as its hint: a list
    of ``mark_of``'s results, or None.
    """
    found: dict[str, Breakpoint] = {}
    for at, kept in enumerate(marks):
        for mark in kept if isinstance(kept, list) else ():
            found[mark["ttl"]] = Breakpoint(at, mark["chars"], mark["ttl"])
    return list(found.values())
