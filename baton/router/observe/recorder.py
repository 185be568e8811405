"""A redacted trace of what was served: Mooncake JSONL, one line per answer, to plan with.

Knows nothing of routing or workers. A line holds times, lengths and chained ids of 512-token blocks: no text, no
tokens and no hash of them. An id says only that a block, after the same blocks before it, was seen before, as the
workers' caches would: of the same weights, adapter and tenant's salt. Ids are numbered from a random start. What
blocks are told apart by is never written: the hashes that the routing made of them, or Python's own of their tokens
where it made none. Adapters are numbered as they come, by content, from a random start as well, so that a number
is of one run of one process; their names are not written.

    {"timestamp": ms since 1970, "input_length": n, "output_length": n, "hash_ids": [...], "adapter": n}
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from baton.cluster.prefix_index import HASH_BYTES
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS as HASHED_TOKENS
from baton.protos.nouns import RECORDED_ADAPTERS

BLOCK_TOKENS = 512  # tokens of a recorded block, as in Mooncake's traces
BLOCK_BYTES = BLOCK_TOKENS // HASHED_TOKENS * HASH_BYTES  # of a chain
REMEMBERED_BLOCKS = 100_000  # at least, and twice as many at most
KEPT_FILES = 4  # older files beside the one that is written
WRITE_S = 0.25  # seconds after which lines that wait are written
MOST_LINES = 256  # that wait to be written
MOST_LINE_BYTES = 1 << 20  # of a line: a million prompt tokens have some 2000 ids of at most 20 digits
ENCODER = msgspec.json.Encoder()


class TraceLine(msgspec.Struct, gc=False, omit_defaults=True):
    """Describes one answer in the trace: ``timestamp`` is arrival in Unix milliseconds, lengths are in tokens.

    ``hash_ids`` has one id per 512-token block of the prompt. ``adapter`` 0: none, and the field is left out.
    """

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    adapter: int = 0


# A line to be: when it came, its lengths in and out, its chain, the prompt's tokens that are in none of its blocks,
# and its adapter.
AnswerRecord = tuple[int, int, int, bytes, Sequence[int], str]


class TraceRecorder:
    """Appends answers to the trace file ``path``; at ``max_bytes`` t.jsonl becomes t.1.jsonl, that t.2.jsonl, …,
    KEPT_FILES at most.

    Under an event loop lines are written together, within ``WRITE_S``. ``wall_clock`` gives Unix seconds. If the
    disk is full, lines are dropped and counted in ``lost``. Raises ConfigError if the file can't be opened.
    """

    def __init__(
        self, path: str, max_bytes: int, wall_clock: Callable[[], float], entropy: Callable[[int], bytes]
    ) -> None:
        self.lost = 0
        self._path, self._max_bytes, self._wall_clock = Path(path), max_bytes, wall_clock
        self._root, self._next = int.from_bytes(entropy(7), "little"), int.from_bytes(entropy(5), "little") << 20
        self._waiting: list[AnswerRecord] = []
        self._young: dict[int, int] = {}  # blocks' ids, in two generations
        self._old: dict[int, int] = {}
        self._adapters: dict[str, int] = {}
        self._before_adapters = (1 + int.from_bytes(entropy(4), "little")) * RECORDED_ADAPTERS
        self._over = False  # whether ``close`` was called
        self._file = self._open()

    def record(
        self, ago_s: float, token_ids: Sequence[int], output_tokens: int, chain: bytes = b"", adapter_id: str = ""
    ) -> None:
        """Records an answer to a prompt that arrived ``ago_s`` seconds ago; one without output tokens leaves no
        line.

        ``chain``: the prompt's block hashes (``cluster.prefix_index.truncated``), b"" if they were not computed.
        """
        if not output_tokens or not token_ids:
            return
        rest = token_ids[len(chain) // HASH_BYTES * HASHED_TOKENS :]
        arrived_ms = int((self._wall_clock() - ago_s) * 1e3)
        self._waiting.append((arrived_ms, len(token_ids), output_tokens, chain, rest, adapter_id))
        if len(self._waiting) >= MOST_LINES:
            self.write()
        elif len(self._waiting) == 1:
            self._write_soon()

    def write(self) -> None:
        """Writes the buffered lines to the file."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        lines = [
            TraceLine(
                at,
                tokens,
                written,
                [self._id(block) for block in self._blocks(tokens, chain, rest, adapter)],
                self._number(adapter),
            )
            for at, tokens, written, chain, rest, adapter in waiting
        ]
        try:
            size = self._append(ENCODER.encode_lines(lines))
        except (OSError, ValueError, ConfigError):  # ValueError: it is closed
            self.lost += len(waiting)
            return
        if size >= self._max_bytes:
            with suppress(OSError, ConfigError):  # tried again with the next lines
                self._rotate()

    def _append(self, data: bytes) -> int:
        """Writes all of ``data``, or nothing on a full disk, because the next line would begin within half a one.
        Returns the file's size in bytes.
        """
        if self._file.closed and not self._over:
            self._file = self._open()  # a rotation closed it and could open no other
        size = os.fstat(self._file.fileno()).st_size
        if self._file.write(data) != len(data):
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, "lines were written in part")
        return size + len(data)

    def close(self) -> None:
        """Writes the buffered lines and closes the file."""
        self.write()
        self._over = True
        self._file.close()

    def _write_soon(self) -> None:
        try:
            asyncio.get_running_loop().call_later(WRITE_S, self.write)
        except RuntimeError:  # nobody would come back to it
            self.write()

    def _number(self, adapter: str) -> int:
        if not adapter:
            return 0
        return self._adapters.setdefault(adapter, self._before_adapters + len(self._adapters) + 1)

    def _blocks(self, tokens: int, chain: bytes, rest: Sequence[int], adapter: str) -> list[int]:
        """Returns the numbers that tell each block of a prompt, with those before it, from others."""
        if not chain:
            return self._hashed(rest, hash((self._root, adapter)) if adapter else self._root)
        ends = range(BLOCK_BYTES, len(chain) + 1, BLOCK_BYTES)
        found = [hash(chain[end - HASH_BYTES : end]) for end in ends]
        if tokens % BLOCK_TOKENS:
            found.append(hash((chain[-HASH_BYTES:], tuple(rest))))
        return found

    def _hashed(self, token_ids: Sequence[int], root: int) -> list[int]:
        found, block = [], root
        for at in range(0, len(token_ids), BLOCK_TOKENS):
            block = hash((block, tuple(token_ids[at : at + BLOCK_TOKENS])))
            found.append(block)
        return found

    def _id(self, block: int) -> int:
        found = self._young.get(block)
        if found is None:
            found = self._old.get(block)
            if found is None:
                found, self._next = self._next, self._next + 1
            self._young[block] = found
            if len(self._young) >= REMEMBERED_BLOCKS:
                self._old, self._young = self._young, {}
        return found

    def _open(self) -> IO[bytes]:
        try:
            file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"can't write the trace: {error}", "router.trace_file") from error
        with suppress(OSError):  # of a pipe, which has no end
            _cut_half_line(self._path)
        return file

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


def _cut_half_line(path: Path) -> None:
    """Removes from the file's end what is no whole line, as a machine that failed leaves it.

    Raises ConfigError where the file ends with something else than a line of a trace, because it is somebody's.
    """
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MOST_LINE_BYTES))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            whole = tail.rfind(b"\n") + 1
            if not tail.startswith(b"{", whole):
                raise ConfigError(f"{path} is no trace, by its end: name another file", "router.trace_file")
            file.truncate(size - len(tail) + whole)
