"""Keeps a copy of the host's KV pages on a card on which torch's ops run.

Knows nothing of attention. The host's pages stay what handoffs, tiers and other workers read and write: what a step
needs and isn't current on the card is copied there before it, and the pages that it wrote are copied back after it.
Copies are of pageable memory, so the step waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.engine.backends.residency import PageResidency
from baton.engine.plan import SequenceStep
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS

COPY_BYTES = 64 << 20  # of one copy, which takes as much memory again on either side


class CardPages:
    """Mirrors ``host``, (pages, bytes of a page) uint8, on ``device``; ``memory`` is the copy and a spare page
    behind it, for rows of no sequence. Raises ConfigError if there is too little memory.
    """

    def __init__(self, host: Tensor, device: str) -> None:
        self._host, self._resident = host, PageResidency(len(host))
        self._at_once = max(1, COPY_BYTES // host.shape[1])
        try:
            # zeros, because a step's trial reads pages before they have anything in them
            self.memory = torch.zeros((len(host) + 1, host.shape[1]), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            text = f"device {device}: the card has no {host.numel() / (1 << 30):.2f} GiB for KV pages: {error}"
            raise ConfigError(f"{text}; lower worker.kv_memory_bytes or worker.pages", "kv_memory_bytes") from error

    def bring(self, items: Sequence[SequenceStep]) -> list[int]:
        """Copies to the card what a step of ``items`` needs and isn't current there; returns those pages."""
        missing = self._resident.missing(items)
        for pages in self._runs(missing):
            self.memory.index_copy_(0, pages.to(self.memory.device), self._host[pages].to(self.memory.device))
        return missing

    def write_back(self, items: Sequence[SequenceStep], brought: Sequence[int]) -> None:
        """Copies to the host the pages that the step of ``items`` wrote, before which ``brought`` were copied."""
        for pages in self._runs(sorted({page for item in items for page in _written(item)})):
            self._host.index_copy_(0, pages, self.memory[pages.to(self.memory.device)].cpu())
        self._resident.ran(items, brought)

    def failed(self) -> None:
        """Takes no page on the card for current any more, because a step failed after unknown writes."""
        self._resident.failed()

    def _runs(self, pages: Sequence[int]) -> Iterator[Tensor]:
        for begin in range(0, len(pages), self._at_once):
            yield torch.tensor(pages[begin : begin + self._at_once], dtype=torch.int64)


def _written(item: SequenceStep) -> Sequence[int]:
    end = item.start + len(item.tokens)
    return item.pages[item.start // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]
