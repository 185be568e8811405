"""Splitting of text that arrives in pieces at a mark; a tail that may be the mark's beginning is held back.

Knows nothing of what a mark means.
"""

from __future__ import annotations

from baton.router.text.detokenize import StopStrings


class MarkSplitter:
    """Splits text that arrives in pieces at the first of ``marks``; ``mark`` is the one that was found."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self.mark = ""
        self._stops = StopStrings(marks, include=True)
        self._behind = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text before a mark, and the text after it, None while no mark has come."""
        tail = self._stops.held
        released, found = self._stops.push(text)
        if not found:
            return released, None
        self.mark = mark = next(m for m in self._marks if released.endswith(m))
        return released[: -len(mark)], (tail + text)[len(released) :]

    def flush(self) -> str:
        """Returns the text that was held back as a mark's possible beginning."""
        return self._stops.flush()


class Interlude:
    """Passes on the text between calls. What is blank is held back until other text follows it: white space between
    calls, or behind the last, is nobody's.
    """

    def __init__(self) -> None:
        self._held, self._says = "", True

    def push(self, text: str) -> str:
        """Returns the text that ``text``, the next part between calls, makes certain."""
        if not self._says and (not text or text.isspace()):
            self._held += text
            return ""
        found, self._held, self._says = self._held + text, "", True
        return found

    def call(self) -> None:
        """Records that a call was read: what is held back is dropped."""
        self._held, self._says = "", False
