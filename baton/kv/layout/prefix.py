"""Computes block hashes: a SHA-256 chain over token ids, stable across processes, versions and languages.

Knows nothing of pages, of who caches what, or of tensors.

    root   = SHA-256("baton.kv.v1" NUL, then for fingerprint, fidelity, adapter, salt: u32 length, bytes)
    hash_i = SHA-256(hash_{i-1}, u32 count, count x u32 token ids)          all u32 little-endian

``count`` is the block size for a full block and less for a prompt's tail, so a tail never has a full block's hash.
The physical layout is not hashed: two workers that hold the same numbers in different layouts share hashes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256

from baton.protos.errors import InvalidRequest
from baton.protos.nouns import BLOCK_TOKENS

_DOMAIN = b"baton.kv.v1\x00"


def root(fingerprint: str, fidelity: str, adapter: str = "", salt: bytes = b"") -> bytes:
    """Returns the first parent of a hash chain, 32 bytes that depend on the weights, KV fidelity, adapter and
    tenant.
    """
    parts = (fingerprint.encode(), fidelity.encode(), adapter.encode(), salt)
    return sha256(_DOMAIN + b"".join(struct.pack("<I", len(part)) + part for part in parts)).digest()


def _link(parent: bytes, packed: bytes, count: int) -> bytes:
    digest = sha256(parent)
    digest.update(struct.pack("<I", count))
    digest.update(packed)
    return digest.digest()


def _pack(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise InvalidRequest(f"token ids must be integers in 0..2^32-1: {error}", "token_ids") from error


def block_hashes(root: bytes, token_ids: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
    """Returns the chained hash, 32 bytes, of each full block of ``token_ids``; a partial last block has none.
    Raises InvalidRequest for ids outside 0 to 2^32 - 1.
    """
    full = len(token_ids) // block_tokens
    packed = _pack(token_ids[: full * block_tokens])
    hashes, parent, size, count = [], root, 4 * block_tokens, struct.pack("<I", block_tokens)
    for start in range(0, full * size, size):  # _link inlined, because a long prompt has thousands of blocks
        parent = sha256(parent + count + packed[start : start + size]).digest()
        hashes.append(parent)
    return hashes


def chain(root: bytes, token_ids: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
    """Returns ``block_hashes`` and, if the last block isn't full, also its hash. Raises InvalidRequest for ids
    outside 0 to 2^32 - 1.
    """
    hashes = block_hashes(root, token_ids, block_tokens)
    tail = token_ids[len(hashes) * block_tokens :]
    if tail:
        hashes.append(_link(hashes[-1] if hashes else root, _pack(tail), len(tail)))
    return hashes


class Chain:
    """Extends a hash chain token by token. ``hashes`` has the hash of each full block so far."""

    def __init__(self, root: bytes, token_ids: Sequence[int] = (), block_tokens: int = BLOCK_TOKENS) -> None:
        self.hashes = block_hashes(root, token_ids, block_tokens)
        self._parent = self.hashes[-1] if self.hashes else root
        self._block_tokens = block_tokens
        self._tail: list[int] = list(token_ids[len(self.hashes) * block_tokens :])

    def append(self, token: int) -> bytes | None:
        """Adds one token to the chain. Returns the hash of the block that it completed, or None."""
        self._tail.append(token)
        if len(self._tail) < self._block_tokens:
            return None
        filled = self._parent = _link(self._parent, _pack(self._tail), len(self._tail))
        self.hashes.append(filled)
        self._tail.clear()
        return filled

    def extend(self, tokens: Iterable[int]) -> list[bytes]:
        """Adds tokens to the chain, in order. Returns the hashes of the blocks that they completed."""
        return [filled for token in tokens if (filled := self.append(token)) is not None]
