"""Says what a shared store of blocks must do, and how a block lies in it. Torch-free.

Knows nothing of folders, buckets or threads. A blob carries all that says whether it is the block that was asked
for, so that a store which lost, swapped, cut or damaged it costs a miss:

    magic 16 | BLAKE2b-256 of the rest 32 | meaning 32 | block's hash 32 | page

``meaning`` is a digest of the layout and the weights: workers share blocks where both are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec

from baton.protos.nouns import KvLayout

MAGIC = b"baton.kv.share.1"
DIGEST_BYTES = 32
HEAD_BYTES = len(MAGIC) + 3 * DIGEST_BYTES
NAME_LENGTHS = [32, 2, 64]  # of the three parts of a name, in hex digits
HEX = frozenset("0123456789abcdef")


class Entry(NamedTuple):
    """Describes a blob of a store: ``used_at`` in seconds since 1970, as the store says it."""

    name: str
    size: int
    used_at: float


class BlobStore(Protocol):
    """Keeps blobs by name. Every method may raise OSError, and may take as long as a network does."""

    def get(self, name: str, most: int) -> bytes | None:
        """Returns a blob, the first ``most`` bytes of a longer one, None where there is none."""

    def has(self, name: str) -> bool:
        """Returns whether there is such a blob."""

    def put(self, name: str, blob: bytes) -> None:
        """Stores a blob whole or not at all."""

    def remove(self, name: str) -> None:
        """Removes a blob; one that isn't there is no error."""

    def entries(self) -> Iterator[Entry]:
        """Yields all that the store holds, also what others put there."""


def meaning_of(layout: KvLayout, fingerprint: str) -> bytes:
    """Returns the digest of what must be the same for workers to share blocks, 32 bytes."""
    return hashlib.sha256(msgspec.json.encode((msgspec.to_builtins(layout), fingerprint))).digest()


def name_of(meaning: bytes, block: bytes) -> str:
    """Returns the name of a block's blob: ``meaning/xx/hash``, in hex."""
    text = block.hex()
    return f"{meaning.hex()[:32]}/{text[:2]}/{text}"


def is_name(name: str) -> bool:
    """Returns whether ``name`` is one that ``name_of`` gives: a store may hold what isn't ours to remove."""
    parts = name.split("/")
    return [len(part) for part in parts] == NAME_LENGTHS and HEX.issuperset("".join(parts))


def blob_bytes(page_bytes: int) -> int:
    """Returns the size of a block's blob."""
    return HEAD_BYTES + page_bytes


def packed(meaning: bytes, block: bytes, page: bytes) -> bytes:
    """Returns the blob of a block."""
    signed = meaning + block + page
    return MAGIC + hashlib.blake2b(signed, digest_size=DIGEST_BYTES).digest() + signed


def unpacked(blob: bytes, meaning: bytes, block: bytes, page_bytes: int) -> memoryview | None:
    """Returns the page of ``block`` in a blob; None where the blob is not exactly that."""
    view, at = memoryview(blob), len(MAGIC)
    if len(blob) != blob_bytes(page_bytes) or view[:at] != MAGIC:
        return None
    digest, signed = view[at : at + DIGEST_BYTES], view[at + DIGEST_BYTES :]
    if signed[:DIGEST_BYTES] != meaning or signed[DIGEST_BYTES : 2 * DIGEST_BYTES] != block:
        return None
    if hashlib.blake2b(signed, digest_size=DIGEST_BYTES).digest() != digest:
        return None
    return signed[2 * DIGEST_BYTES :]
