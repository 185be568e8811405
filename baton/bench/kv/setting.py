"""Definitions that the sending and the receiving process of the KV benchmark share.

Knows nothing of how anything is measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton.kernels.kv_copy.cpu import copy_only
from baton.kv.layout.page import layout_for
from baton.kv.memory import copying
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import frames
from baton.protos.nouns import BLOCK_TOKENS, KvLayout
from baton.tls.authority import Authority
from baton.tls.identity import Identity, TlsFiles

FINGERPRINT = "f" * 64
BARE = "baton.bench.Bare"
TLS = "tcp, TLS"  # the transport tcp between ends that have certificates
CHUNKS = 8  # of the paced prefill, in one handoff
BIG_BYTES = 16 << 10  # what is hashed at this size is a block


def layout(page_bytes: int) -> KvLayout:
    """Returns a KV layout whose pages have ``page_bytes`` bytes, whatever they hold."""
    return layout_for("bytes", 1, page_bytes // (2 * BLOCK_TOKENS), 1)


def hashes(count: int) -> list[bytes]:
    """Returns ``count`` made-up block hashes."""
    return [number.to_bytes(frames.HASH_BYTES, "little") for number in range(count)]


def lease(count: int) -> bytes:
    """Returns the id of the lease for a handoff of ``count`` blocks."""
    return count.to_bytes(frames.LEASE_BYTES, "little")


def chunk_counts(pages: int) -> list[int]:
    """Returns the number of blocks in one chunk, and in the whole paced prompt of CHUNKS chunks."""
    return [max(1, pages // CHUNKS), max(1, pages // CHUNKS) * CHUNKS]


def identity(folder: Path) -> Identity:
    """Returns a worker's TLS identity, signed by the CA in ``folder``, which is made if it isn't there."""
    Authority(folder).make(("worker",))
    files = TlsFiles(str(folder / "worker.crt"), str(folder / "worker.key"), str(folder / "ca.crt"))
    return Identity(files, "the bench")


def source(page_bytes: int, pages: int) -> PageMemory:
    """Returns ``pages`` pages of random bytes, no two alike."""
    memory = PageMemory.create(pages, page_bytes)
    view, noise = memory.view(), os.urandom(1 << 20)
    for at in range(0, len(view), len(noise)):
        view[at : at + len(noise)] = noise[: len(view) - at]
        view[at : at + 8] = at.to_bytes(8, "little")
    return memory


def touch(view: memoryview) -> None:
    """Writes to each page of ``view``, so that the kernel maps all of it now."""
    for at in range(0, len(view), 4096):
        view[at] = 1


Known = dict[int, int]
"""Checksums of whole pages that never change, by their address."""


def known_checksums(memory: PageMemory, page_bytes: int) -> Known:
    """Returns the checksum of each page of ``memory``, by the page's address."""
    pages = [memory.page(number) for number in range(len(memory.view()) // page_bytes)]
    return dict(zip(map(copying.address, pages), copying.checksums(pages), strict=True))


@contextmanager
def looked_up(known: Known) -> Iterator[None]:
    """While the block runs, takes the sender's checksums from ``known`` in place of computing them."""
    plain = copying.kv_copy

    def copied(dst: Sequence[int] | None, src: Sequence[int], size: int) -> list[int]:
        if dst is not None:
            copy_only(dst, src, size)
        return [known[address] for address in src]

    copying.kv_copy = copied
    try:
        yield
    finally:
        copying.kv_copy = plain


@contextmanager
def skipped() -> Iterator[None]:
    """While the block runs, neither computes nor compares checksums of blocks at the receiver; headers are still
    checked.
    """
    plain = (copying.kv_copy, frames.checksum, frames.digest, frames.check_blocks)

    class NoChecksum:
        def update(self, data: frames.Bytes) -> None:
            """Ignores ``data``, because no checksum is kept."""

        def reset(self) -> None:
            """Begins another block; no checksum is kept, so nothing has to be cleared."""

        def intdigest(self) -> int:
            return 0

    def copied(dst: Sequence[int] | None, src: Sequence[int], size: int) -> list[int]:
        assert dst is not None, "a receiver never asks for checksums alone"
        copy_only(dst, src, size)
        return [0] * len(src)

    copying.kv_copy = copied
    frames.checksum = lambda data: 0 if len(data) >= BIG_BYTES else plain[1](data)
    frames.digest = NoChecksum
    frames.check_blocks = lambda frame, checksums: None
    try:
        yield
    finally:
        copying.kv_copy, frames.checksum, frames.digest, frames.check_blocks = plain
