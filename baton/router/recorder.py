"""A redacted trace of what was served: Mooncake JSONL, one line per answer, to plan with.

Knows nothing of routing or workers. A line holds times, lengths and chained ids of 512-token blocks: no text, no
tokens and no hash of them. An id says only that a block, after the same blocks before it, was seen
before; ids are numbered from a random start, and what blocks are told apart by is begun anew in each process and
never written: Python's own hash of their tokens, 64 bits, which takes a third of SHA-256's time.

    {"timestamp": ms since 1970, "input_length": n, "output_length": n, "hash_ids": [...]}
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from baton.protos.errors import ConfigError

BLOCK_TOKENS = 512
REMEMBERED_BLOCKS = 200_000
KEPT_FILES = 4
WRITE_S = 0.25
MOST_LINES = 256  # that wait to be written
ENCODER = msgspec.json.Encoder()


class Line(msgspec.Struct, gc=False):
    """One answer. Until it is written ``hash_ids`` are what tells blocks, and those before them, from others."""

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
        self._root, self._next = int.from_bytes(entropy(7), "little"), int.from_bytes(entropy(5), "little") << 20
        self._waiting: list[Line] = []
        self._ids: OrderedDict[int, int] = OrderedDict()
        self._file = self._open()

    def record(self, ago_s: float, token_ids: Sequence[int], output_tokens: int) -> None:
        """An answer to a prompt that arrived ``ago_s`` seconds ago; one without a token leaves no line."""
        self.of(token_ids)(ago_s, output_tokens)

    def of(self, token_ids: Sequence[int]) -> Callable[[float, int], None]:
        """``record`` for one prompt, which is read now: it was looked at a moment ago."""
        blocks, block = [], self._root
        for at in range(0, len(token_ids), BLOCK_TOKENS):
            block = hash((block, tuple(token_ids[at : at + BLOCK_TOKENS])))
            blocks.append(block)
        return partial(self._answered, len(token_ids), blocks)

    def _answered(self, input_tokens: int, blocks: list[int], ago_s: float, output_tokens: int) -> None:
        if not output_tokens or not input_tokens:
            return
        arrived_ms = int((self._wall_clock() - ago_s) * 1e3)
        self._waiting.append(Line(arrived_ms, input_tokens, output_tokens, blocks))
        if len(self._waiting) >= MOST_LINES:
            self.write()
        elif len(self._waiting) == 1:
            self._write_soon()

    def write(self) -> None:
        """The answers that wait."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        for line in waiting:
            line.hash_ids = [self._id(block) for block in line.hash_ids]
        try:
            self._file.write(ENCODER.encode_lines(waiting))
            if self._file.tell() >= self._max_bytes:
                self._rotate()
        except (OSError, ValueError, ConfigError):  # ValueError: a rotation closed it and could open no other
            self.lost += len(waiting)

    def close(self) -> None:
        """Write nothing more, after the lines that wait."""
        self.write()
        self._file.close()

    def _write_soon(self) -> None:
        try:
            asyncio.get_running_loop().call_later(WRITE_S, self.write)
        except RuntimeError:  # nobody would come back to it
            self.write()

    def _id(self, block: int) -> int:
        found = self._ids.get(block)
        if found is not None:
            self._ids.move_to_end(block)
            return found
        self._ids[block] = found = self._next
        self._next += 1
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
