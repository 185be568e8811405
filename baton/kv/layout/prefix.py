"""Computes block hashes: a SHA-256 chain over token ids, stable across processes, versions and languages.

Knows nothing of pages, of who caches what, or of tensors.

    root   = SHA-256("baton.kv.v1" NUL, then for fingerprint, fidelity, adapter, salt: u32 length, bytes)
    hash_i = SHA-256(hash_{i-1}, u32 count, count x u32 token ids)          all u32 little-endian

``count`` is the block size for a full block and less for a prompt's tail, so a tail never answers for a full block.
The physical layout is not in it: two workers that hold the same numbers differently share hashes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256

from baton.protos.errors import InvalidRequest
from baton.protos.nouns import BLOCK_TOKENS

_DOMAIN = b"baton.kv.v1\x00"


def root(fingerprint: str, fidelity: str, adapter: str = "", salt: bytes = b"") -> bytes:
    """Returns where a chain starts: 32 bytes that tell weights, KV fidelity, adapter and tenant apart."""
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
    """Returns the hash of each full block of ``token_ids``, 32 bytes each; a partial tail has none. Raises
    InvalidRequest.
    """
    full = len(token_ids) // block_tokens
    packed = _pack(token_ids[: full * block_tokens])
    hashes, parent, size, count = [], root, 4 * block_tokens, struct.pack("<I", block_tokens)
    for start in range(0, full * size, size):  # _link, in one call: a long prompt has thousands
        parent = sha256(parent + count + packed[start : start + size]).digest()
        hashes.append(parent)
    return hashes


def chain(root: bytes, token_ids: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
    """Returns ``block_hashes`` and, when the last block isn't full, the hash of that tail. Raises
    InvalidRequest.
    """
    hashes = block_hashes(root, token_ids, block_tokens)
    tail = token_ids[len(hashes) * block_tokens :]
    if tail:
        hashes.append(_link(hashes[-1] if hashes else root, _pack(tail), len(tail)))
    return hashes


class Chain:
    """Grows a chain token by token. ``hashes`` holds one hash per full block so far."""

    def __init__(self, root: bytes, token_ids: Sequence[int] = (), block_tokens: int = BLOCK_TOKENS) -> None:
        self.hashes = block_hashes(root, token_ids, block_tokens)
        self._parent = self.hashes[-1] if self.hashes else root
        self._block_tokens = block_tokens
        self._tail: list[int] = list(token_ids[len(self.hashes) * block_tokens :])

    def append(self, token: int) -> bytes | None:
        """Adds one token. Returns the hash of the block that it filled, or None."""
        self._tail.append(token)
        if len(self._tail) < self._block_tokens:
            return None
        filled = self._parent = _link(self._parent, _pack(self._tail), len(self._tail))
        self.hashes.append(filled)
        self._tail.clear()
        return filled

    def extend(self, tokens: Iterable[int]) -> list[bytes]:
        """Adds tokens in order. Returns the hashes of the blocks that they filled."""
        return [filled for token in tokens if (filled := self.append(token)) is not None]
