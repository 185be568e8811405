"""Defines the interface of a shared store of blocks, and the format of a block in it. Torch-free.

Knows nothing of folders, buckets or threads. A blob contains what is needed to verify that it is the requested
block, so that one which the store lost, swapped, cut or damaged is a miss:

    magic 16 | BLAKE2b-256 of the rest 32 | meaning 32 | block's hash 32 | page

``meaning`` is a digest of the layout and the weights: workers with the same ones share blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import msgspec

from baton.protos.nouns import KvLayout

MAGIC = b"baton.kv.share.1"
DIGEST_BYTES = 32  # bytes of a BLAKE2b digest here
HEAD_BYTES = len(MAGIC) + 3 * DIGEST_BYTES  # of a blob, in front of its page
NAME_LENGTHS = [32, 2, 64]  # hex digits of the three parts of a name
HEX = frozenset("0123456789abcdef")


class Entry(NamedTuple):
    """A blob in a store."""

    name: str
    size: int  # bytes
    used_at: float  # time of the last use, in seconds since 1970, by the store's clock


class BlobStore(Protocol):
    """Stores blobs by name. Every method may raise OSError, and may take as long as a network does."""

    def get(self, name: str, most: int) -> bytes | None:
        """Returns the first ``most`` bytes of a blob, None if there is none of that name."""

    def has(self, name: str) -> bool:
        """Returns whether there is a blob of that name."""

    def put(self, name: str, blob: bytes) -> None:
        """Stores a blob, whole or not at all."""

    def remove(self, name: str) -> None:
        """Removes a blob; does nothing if there is none of that name."""

    def entries(self) -> Iterator[Entry]:
        """Yields everything in the store, including what others put there."""


def meaning_of(layout: KvLayout, fingerprint: str) -> bytes:
    """Returns the 32-byte digest of ``layout`` and weights ``fingerprint``; workers with the same one can share
    blocks.
    """
    return hashlib.sha256(msgspec.json.encode((msgspec.to_builtins(layout), fingerprint))).digest()


def name_of(meaning: bytes, block: bytes) -> str:
    """Returns the name of a block's blob, ``meaning/xx/hash`` in hex, from ``meaning`` and the block hash."""
    text = block.hex()
    return f"{meaning.hex()[:32]}/{text[:2]}/{text}"


def is_name(name: str) -> bool:
    """Returns whether ``name`` has the form of ``name_of``; a store may have files that aren't ours to remove."""
    parts = name.split("/")
    return [len(part) for part in parts] == NAME_LENGTHS and HEX.issuperset("".join(parts))


def blob_bytes(page_bytes: int) -> int:
    """Returns the size in bytes of the blob of a page of ``page_bytes`` bytes."""
    return HEAD_BYTES + page_bytes


def packed(meaning: bytes, block: bytes, page: bytes) -> bytes:
    """Returns the blob of a block with hash ``block`` and bytes ``page``."""
    signed = meaning + block + page
    return MAGIC + hashlib.blake2b(signed, digest_size=DIGEST_BYTES).digest() + signed


def unpacked(blob: bytes, meaning: bytes, block: bytes, page_bytes: int) -> memoryview | None:
    """Returns the page in ``blob``; None unless it is a valid blob of block hash ``block`` with a page of
    ``page_bytes`` bytes.
    """
    view, at = memoryview(blob), len(MAGIC)
    if len(blob) != blob_bytes(page_bytes) or view[:at] != MAGIC:
        return None
    digest, signed = view[at : at + DIGEST_BYTES], view[at + DIGEST_BYTES :]
    if signed[:DIGEST_BYTES] != meaning or signed[DIGEST_BYTES : 2 * DIGEST_BYTES] != block:
        return None
    if hashlib.blake2b(signed, digest_size=DIGEST_BYTES).digest() != digest:
        return None
    return signed[2 * DIGEST_BYTES :]
