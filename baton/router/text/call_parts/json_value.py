"""Finds the end of one JSON object or array in text that arrives in pieces.

Knows nothing of what the value means, and doesn't check it: brackets and strings are all that it reads.
"""

from __future__ import annotations


class JsonValue:
    """Follows one value from its first bracket on; ``done`` is set after its last, ``in_string`` in a string."""

    def __init__(self) -> None:
        self.done = self.in_string = False
        self._depth = 0
        self._escaped = False

    def push(self, text: str) -> int:
        """Returns how many characters of ``text`` belong to the value."""
        for at, char in enumerate(text):
            if self.done:
                return at
            if self.in_string:
                self.in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self.in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self.done = self._depth <= 0
        return len(text)
