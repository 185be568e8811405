"""The log of a simulated run, line by line, in virtual time: the same seed gives the same bytes."""

from __future__ import annotations

import hashlib


class Story:
    """The lines of a run's log. Without ``keep`` only their hash is kept, which suffices to compare two runs."""

    def __init__(self, keep: bool = True) -> None:
        self.lines: list[str] = []
        self._keep, self._hash = keep, hashlib.blake2b(digest_size=16)

    def tell(self, at: float, who: str, what: str) -> None:
        """Adds a line: at time ``at`` (virtual seconds), what happened to ``who``."""
        line = f"{at:10.6f} {who:<12} {what}"
        self._hash.update(line.encode() + b"\n")
        if self._keep:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        """Returns the hash of all lines so far, in hex."""
        return self._hash.hexdigest()
