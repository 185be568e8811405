"""A redacted trace of what was served: Mooncake JSONL, one line per answer, to plan with.

Knows nothing of routing or workers. A line holds times, lengths and chained ids of 512-token blocks: no text, no
tokens and no hash of them. An id says only that a block, after the same blocks before it, was seen
before; ids are numbered from a random start, and their hashes are salted anew in each process and never written.

    {"timestamp": ms since 1970, "input_length": n, "output_length": n, "hash_ids": [...]}
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from baton.kv import prefix
from baton.protos.errors import ConfigError

BLOCK_TOKENS = 512
REMEMBERED_BLOCKS = 200_000
KEPT_FILES = 4
WRITE_S = 0.25
MOST_LINES = 256  # that wait to be written


class Line(msgspec.Struct, frozen=True):
    """One answer."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceRecorder:
    """Appends to ``path``; at ``max_bytes`` t.jsonl becomes t.1.jsonl, that t.2.jsonl, … of which some are kept.

    Under an event loop lines are written together, within ``WRITE_S``. ``wall_clock`` in seconds since 1970. A disk
    that is full loses lines (``lost``), never an answer.
    """

    def __init__(
        self, path: str, max_bytes: int, wall_clock: Callable[[], float], entropy: Callable[[int], bytes]
    ) -> None:
        self.lost = 0
        self._path, self._max_bytes, self._wall_clock = Path(path), max_bytes, wall_clock
        self._root, self._next = entropy(32), int.from_bytes(entropy(5), "little") << 20
        self._lines: list[bytes] = []
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self._file = self._open()

    def record(self, ago_s: float, token_ids: Sequence[int], output_tokens: int) -> None:
        """An answer to a prompt that arrived ``ago_s`` seconds ago; one without a token leaves no line."""
        if not output_tokens or not token_ids:
            return
        hashes = prefix.chain(self._root, token_ids, BLOCK_TOKENS)
        arrived = int((self._wall_clock() - ago_s) * 1e3)
        line = Line(arrived, len(token_ids), output_tokens, [self._id(h) for h in hashes])
        self._lines.append(msgspec.json.encode(line) + b"\n")
        if len(self._lines) == 1:
            self._write_soon()
        elif len(self._lines) >= MOST_LINES:
            self.write()

    def write(self) -> None:
        """The lines that wait."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            self._file.write(b"".join(lines))
            if self._file.tell() >= self._max_bytes:
                self._rotate()
        except (OSError, ValueError, ConfigError):  # ValueError: a rotation closed it and could open no other
            self.lost += len(lines)

    def of(self, token_ids: Sequence[int]) -> Callable[[float, int], None]:
        """``record`` for one prompt."""
        return lambda ago_s, output_tokens: self.record(ago_s, token_ids, output_tokens)

    def close(self) -> None:
        """Write nothing more, after the lines that wait."""
        self.write()
        self._file.close()

    def _write_soon(self) -> None:
        try:
            asyncio.get_running_loop().call_later(WRITE_S, self.write)
        except RuntimeError:  # nobody would come back to it
            self.write()

    def _id(self, block: bytes) -> int:
        found = self._ids.pop(block, None)
        if found is None:
            found, self._next = self._next, self._next + 1
        self._ids[block] = found
        if len(self._ids) > REMEMBERED_BLOCKS:
            self._ids.popitem(last=False)
        return found

    def _open(self) -> IO[bytes]:
        try:
            return self._path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"can't write the trace: {error}", "router.trace_file") from error

    def _rotate(self) -> None:
        self._file.close()
        for n in range(KEPT_FILES - 1, 0, -1):
            older = self._numbered(n)
            if older.exists():
                older.replace(self._numbered(n + 1))
        self._path.replace(self._numbered(1))
        self._file = self._open()

    def _numbered(self, n: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.{n}{self._path.suffix}")
