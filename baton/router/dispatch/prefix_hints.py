"""Prefix hints: which workers hold how many blocks of a prompt, asked of the prefix index in bounded time.

The answers may be out of date. Knows nothing of Redis or of policies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from baton.cluster.prefix_index import truncated
from baton.cluster.store.patience import CircuitBreaker
from baton.kv.layout import prefix
from baton.protos.nouns import BLOCK_TOKENS, WorkerInfo
from baton.router.policies import ClusterSnapshot
from baton.router.request.request import ChoiceSummary, RouterRequest

HASH_OFF_LOOP_TOKENS = 4096  # tokens from which a chain is hashed in a thread


class PrefixLookup(Protocol):
    """Knows how much of a block-hash chain each worker holds; ``cluster.prefix_index.PrefixIndex`` implements
    it.
    """

    async def longest(self, workers: Sequence[str], hashes: bytes) -> dict[str, int]:
        """Returns the number of leading blocks held, by worker id, of ``hashes`` (as made by ``truncated``)."""


class PrefixHints:
    """Asks the prefix index for the blocks of a prompt that workers hold; finds none without an index, or if
    ``patience`` gives up on it.

    ``keeps``: the prompt's hash chain is kept in the summary, for metrics and traces.
    """

    def __init__(
        self, index: PrefixLookup | None, patience: CircuitBreaker | None = None, keeps: bool = False
    ) -> None:
        self._index, self._patience, self._keeps = index, patience or CircuitBreaker(), keeps

    async def hits(
        self, snapshot: ClusterSnapshot, request: RouterRequest, tokens: tuple[int, ...], summary: ChoiceSummary
    ) -> dict[str, int]:
        """Returns, by worker id, how many leading blocks (of BLOCK_TOKENS tokens) of ``tokens`` the worker seems to
        hold.

        Only workers of the same weights count. The hash chain is stored in ``summary`` if it is wanted and missing.
        """
        workers = [c.info for c in (*snapshot.prefill, *snapshot.decode)]
        if self._index is None or not workers or len(tokens) < BLOCK_TOKENS:
            return {}
        info = workers[-1]
        chains = _chains(workers, info.fingerprint)
        wanted = self._keeps and not summary.chain and tokens is request.token_ids
        if wanted:
            chains.setdefault((info.layout.fidelity, BLOCK_TOKENS), [])
        found: dict[str, int] = {}
        for (fidelity, size), ids in chains.items():
            root = prefix.root(info.fingerprint, fidelity, request.context.adapter_id, request.context.tenant_salt)
            chain = truncated(await _hashes(root, tokens, size))
            if wanted and (fidelity, size) == (info.layout.fidelity, BLOCK_TOKENS):
                summary.name_blocks(chain)
            held = await self._ask(ids, chain) if ids and chain else {}
            found |= {worker: blocks * size // BLOCK_TOKENS for worker, blocks in held.items()}
        return found

    async def _ask(self, ids: Sequence[str], chain: bytes) -> dict[str, int]:
        index = self._index
        assert index is not None
        try:
            return await self._patience.ask(lambda: index.longest(ids, chain))
        except TimeoutError:
            return {}


def _chains(workers: Sequence[WorkerInfo], fingerprint: str) -> dict[tuple[str, int], list[str]]:
    """Returns the workers that share block hashes, by (fidelity, tokens in a block). One, but where these are
    mixed.
    """
    found: dict[tuple[str, int], list[str]] = {}
    for worker in workers:
        if worker.fingerprint == fingerprint and worker.layout.runs:
            found.setdefault((worker.layout.fidelity, worker.layout.block_tokens), []).append(worker.worker_id)
    return found


async def _hashes(root: bytes, tokens: tuple[int, ...], block_tokens: int) -> list[bytes]:
    if len(tokens) < HASH_OFF_LOOP_TOKENS:
        return prefix.block_hashes(root, tokens, block_tokens)
    return await asyncio.to_thread(prefix.block_hashes, root, tokens, block_tokens)
