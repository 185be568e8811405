"""A simulated worker as the simulated router knows it: what is placed there, and what policies see of it.

Knows nothing of events or of how the worker computes.
"""

from __future__ import annotations

from typing import Generic, Protocol, Self, TypeVar

from baton.kv.pages.pool import PagePool
from baton.planner.costs.worker import WorkerCosts
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import BLOCK_TOKENS, WorkerInfo
from baton.router.policies import Candidate


class SimNode(Protocol):
    """Declares what all simulated engines have; ``pool`` is a real page pool."""

    pool: PagePool

    def continue_totals(self, before: Self) -> None:
        """Goes on counting from the totals of ``before``, the worker's engine that died."""


Node = TypeVar("Node", bound=SimNode)


class SimWorker(Generic[Node]):
    """Holds the router's counts for one worker; ``node`` simulates its engine, ``nic_free`` is when its network is
    free.
    """

    def __init__(self, name: str, info: WorkerInfo, node: Node, costs: WorkerCosts, block_tokens: int) -> None:
        self.name = name  # as operators say it: prefill-0
        self.info, self.node, self.costs = info, node, costs
        self._block, self._scale = block_tokens, block_tokens // BLOCK_TOKENS
        self.down = False
        self.sequences = self.pending_prompts = self.pending_tokens = 0
        self.full = False
        self.nic_free = 0.0
        self.version = 0
        self._seen: Candidate | None = None

    def changed(self) -> None:
        """Invalidates the cached ``candidate``."""
        self._seen = None

    def takes(self, tokens: int) -> bool:
        """Returns whether the worker is alive and its KV pool could hold ``tokens``."""
        return not self.down and self.room >= tokens

    @property
    def room(self) -> int:
        """Returns the number of tokens that its KV pool holds, in whole blocks."""
        return min(self.costs.kv_tokens, self.node.pool.pages * self._block)

    def die(self, node: Node) -> None:
        """Marks the worker dead and drops its requests; ``node`` replaces its engine and keeps its totals."""
        node.continue_totals(self.node)
        self.node, self.down, self.full = node, True, False
        self.sequences = self.pending_prompts = self.pending_tokens = 0
        self.version += 1
        self.changed()

    def candidate(self) -> Candidate:
        """Returns the worker as routing policies see it."""
        if self._seen is None:
            leased = self.node.pool.snapshot_counts().leased * self._scale
            load = WorkerLoad(leased_pages=leased, step_curve=self.costs.curve, transfer_curve=self.costs.transfer)
            self._seen = Candidate(
                self.info, load, self.sequences, self.pending_prompts, self.pending_tokens, self.full
            )
        return self._seen
