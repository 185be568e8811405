"""The walk over an answer's text from mark to mark, in which each mark decides which ones are looked for next.

Knows nothing of any one format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from baton.router.text.marks import MarkSplitter
from baton.router.text.tool_events import Event


class ParserPlace(NamedTuple):
    """Says where a parser is: what finds the marks that may come here, and what reads the text before one and the
    mark ("" if none has come yet), appends events, and returns text that is to be read again at the next place.
    """

    splitter: MarkSplitter
    read: Callable[[str, str, list[Event]], str]


def walked(text: str, place: Callable[[], ParserPlace]) -> list[Event]:
    """Returns the events of ``text``, which may come to several places; ``place`` returns the one that a parser is
    at.
    """
    events: list[Event] = []
    rest: str | None = text
    while rest is not None:
        splitter, read = place()
        said, behind = splitter.push(rest)
        again = read(said, "" if behind is None else splitter.mark, events)
        if behind is None and place().splitter is not splitter:
            again += splitter.flush()
        rest = f"{again}{behind or ''}" if again or behind is not None else None
    return events
