"""Both ends of a handoff over tcp as the first version of the frames has them, written from its description alone.

Knows nothing of baton's own framing: what is here must never change, it is what older workers do.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence

import xxhash

HELLO = struct.Struct("<4sBBH16s")
HEADER = struct.Struct("<4sBBHHHI16sIIQQ")
ENTRY = struct.Struct("<I32sQ")
OPEN, BLOCK, COMMIT, ACK, ERROR, PROBE, END = range(1, 8)


def summed(data: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(data))


def frame(
    kind: int, lease: bytes, epoch: int, body: bytes, *, count: int = 0, unit: int = -1, sequence: int = 0,
    subject: int = 0, flags: int = 0,
) -> bytes:  # fmt: skip
    unit = len(body) if unit < 0 else unit
    fields = (b"BKV1", kind, flags, 0, 1, subject, epoch, lease, count, unit, sequence, summed(body))
    head = HEADER.pack(*fields)
    return head + struct.pack("<Q", summed(head)) + body


class Read:
    """A frame as it was read; ``pages`` are its blocks' bytes by index."""

    def __init__(self, sock: socket.socket) -> None:
        head = exactly(sock, 64)
        assert head[:4] == b"BKV1"
        assert summed(head[:56]) == struct.unpack_from("<Q", head, 56)[0], "the header is damaged"
        _, self.kind, self.flags, *_, self.subject, self.epoch, self.lease, count, unit, _, said = (
            HEADER.unpack_from(head)
        )
        assert OPEN <= self.kind <= END, f"kind {self.kind} is unknown"
        self.pages: dict[int, bytes] = {}
        has_blocks = self.kind in (BLOCK, PROBE)
        self.body = exactly(sock, count * ENTRY.size if has_blocks else unit)
        assert summed(self.body) == said, "the body is damaged"
        if has_blocks:
            for index, _, checksum in ENTRY.iter_unpack(self.body):
                self.pages[index] = exactly(sock, unit)
                assert summed(self.pages[index]) == checksum, f"block {index} is damaged"


def exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the peer left")
        data += more
    return bytes(data)


class Receiver:
    """A decode worker's data port in a thread: takes what comes, acknowledges it, and keeps it in ``pages``."""

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}
        self.kinds: list[int] = []
        self.refused: list[Exception] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            with sock:
                try:
                    self._stream(sock)
                except (AssertionError, ConnectionError) as error:
                    self.refused.append(error)

    def _stream(self, sock: socket.socket) -> None:
        magic, version, *_ = HELLO.unpack(exactly(sock, HELLO.size))
        assert (magic, version) == (b"BKVH", 1)
        while True:
            got = Read(sock)
            self.kinds.append(got.kind)
            self.pages |= got.pages
            numbers = b"".join(struct.pack("<I", index) for index in got.pages)
            sock.sendall(frame(ACK, got.lease, got.epoch, numbers, subject=got.kind))
            if got.kind == COMMIT:
                sock.sendall(frame(END, bytes(16), 0, b""))
                return


def send(
    address: str, lease: bytes, opening: bytes, blocks: Sequence[tuple[bytes, bytes]], closing: bytes
) -> list[Read]:
    """A prefill worker's whole handoff of ``blocks`` (hash and bytes of each); every reply up to the end."""
    host, port = address.split(":")
    replies: list[Read] = []
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(HELLO.pack(b"BKVH", 1, 0, 0, b"a stream's own id"[:16]))
        sock.sendall(frame(OPEN, lease, 1, opening))
        for index, (block, page) in enumerate(blocks):
            table, last = ENTRY.pack(index, block, summed(page)), index == len(blocks) - 1
            sock.sendall(
                frame(BLOCK, lease, 1, table, count=1, unit=len(page), sequence=index, flags=int(last)) + page
            )
        sock.sendall(frame(COMMIT, lease, 1, closing, sequence=len(blocks)))
        while not replies or replies[-1].kind != END:
            replies.append(Read(sock))
    return replies
