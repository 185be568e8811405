"""Definitions that the sending and the receiving process of the KV benchmark share.

Knows nothing of how anything is measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from baton.kernels.kv_copy.cpu import copy_only
from baton.kv.layout.page import layout_for
from baton.kv.memory import block_sums, copying
from baton.kv.memory.block_sums import BlockSums, Bytes
from baton.kv.memory.host_pages import PageMemory
from baton.kv.wire import frames
from baton.protos.nouns import BLOCK_TOKENS, KvLayout
from baton.tls.authority import Authority
from baton.tls.identity import Identity, TlsFiles

FINGERPRINT = "f" * 64  # the weights' fingerprint that both ends name, because the real one hashes a checkpoint
BARE = "baton.bench.Bare"
TLS = "tcp, TLS"  # the transport tcp between ends that have certificates
CHUNKS = 8  # of the paced prefill, in one handoff


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


def looked_up(known: Known) -> AbstractContextManager[None]:
    """While the block runs, takes the sender's checksums from ``known`` in place of computing them."""

    def copied(dst: Sequence[int] | None, src: Sequence[int], size: int) -> list[int]:
        if dst is not None:
            copy_only(dst, src, size)
        return [known[address] for address in src]

    return block_sums.using(block_sums.XXH3._replace(copy=copied))


class NoDigest:
    """Takes the place of a digest, and computes nothing."""

    def update(self, data: Bytes) -> None:
        """Ignores ``data``, because no checksum is kept."""

    def reset(self) -> None:
        """Begins another block; no checksum is kept, so nothing has to be cleared."""

    def intdigest(self) -> int:
        """Returns 0 for all bytes."""
        return 0


def skipped() -> AbstractContextManager[None]:
    """While the block runs, computes no checksums of blocks at the receiver; headers are still checked."""

    def copied(dst: Sequence[int] | None, src: Sequence[int], size: int) -> list[int]:
        assert dst is not None, "a receiver never asks for checksums alone"
        copy_only(dst, src, size)
        return [0] * len(src)

    return block_sums.using(BlockSums(copied, lambda data: 0, NoDigest))
