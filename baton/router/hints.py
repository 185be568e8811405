"""Who seems to hold how much of a prompt: asked of the prefix index, in bounded time. A hint, never the truth.

Knows nothing of Redis or of policies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.kv import prefix
from baton.protos.nouns import BLOCK_TOKENS, WorkerInfo
from baton.router.policies import ClusterSnapshot
from baton.router.request import RouterRequest

HASH_OFF_LOOP_TOKENS = 4096
Reuse = Callable[[RouterRequest, Sequence[bytes]], object]


class PrefixIndex(Protocol):
    """Who holds how much of a chain; cluster.prefix_index.PrefixIndex is the real one."""

    async def longest(self, workers: Sequence[str], hashes: Sequence[bytes]) -> dict[str, int]:
        """worker id -> leading blocks."""


class PrefixHints:
    """``hits`` by worker; {} without an index, or when it doesn't answer within ``wait_s``.

    ``reuse`` hears the blocks of every prompt that is asked for, as often as it is.
    """

    def __init__(self, index: PrefixIndex | None, wait_s: float = 0.1, reuse: Reuse | None = None) -> None:
        self._index, self._wait_s, self._reuse = index, wait_s, reuse

    async def hits(
        self, snapshot: ClusterSnapshot, request: RouterRequest, tokens: tuple[int, ...]
    ) -> dict[str, int]:
        """worker id -> leading blocks of 16 of ``tokens`` that it says it holds; of those with the same weights."""
        workers = [c.info for c in (*snapshot.prefill, *snapshot.decode)]
        if self._index is None or not workers or len(tokens) < BLOCK_TOKENS:
            return {}
        info = workers[-1]
        chains = _chains(workers, info.fingerprint)
        metered = self._reuse is not None and tokens is request.token_ids
        if metered:
            chains.setdefault((info.layout.fidelity, BLOCK_TOKENS), [])
        found: dict[str, int] = {}
        for (fidelity, size), ids in chains.items():
            root = prefix.root(info.fingerprint, fidelity, request.adapter_id, request.tenant_salt)
            hashes = await _hashes(root, tokens, size)
            if self._reuse is not None and metered and size == BLOCK_TOKENS:
                self._reuse(request, hashes)
            held = await self._ask(ids, hashes) if ids and hashes else {}
            found |= {worker: blocks * size // BLOCK_TOKENS for worker, blocks in held.items()}
        return found

    async def _ask(self, ids: Sequence[str], hashes: Sequence[bytes]) -> dict[str, int]:
        assert self._index is not None
        try:
            async with asyncio.timeout(self._wait_s):
                return await self._index.longest(ids, hashes)
        except TimeoutError:
            return {}


def _chains(workers: Sequence[WorkerInfo], fingerprint: str) -> dict[tuple[str, int], list[str]]:
    """Who shares block hashes: by (fidelity, tokens in a block). One, but where these are mixed."""
    found: dict[tuple[str, int], list[str]] = {}
    for worker in workers:
        if worker.fingerprint == fingerprint and worker.layout.runs:
            found.setdefault((worker.layout.fidelity, worker.layout.block_tokens), []).append(worker.worker_id)
    return found


async def _hashes(root: bytes, tokens: tuple[int, ...], block_tokens: int) -> list[bytes]:
    if len(tokens) < HASH_OFF_LOOP_TOKENS:
        return prefix.block_hashes(root, tokens, block_tokens)
    return await asyncio.to_thread(prefix.block_hashes, root, tokens, block_tokens)
