"""A simulated worker as the simulated router knows it: what it has placed there, and what policies are shown.

Knows nothing of events or of how the worker computes.
"""

from __future__ import annotations

from typing import Any

from baton.planner.costs.worker import WorkerCosts
from baton.protos.nouns import BLOCK_TOKENS, WorkerInfo, WorkerLoad
from baton.router.policies import Candidate


class SimWorker:
    """Holds what the router has on a worker; ``nic_free``: when its network is."""

    def __init__(self, name: str, info: WorkerInfo, node: Any, costs: WorkerCosts, block_tokens: int) -> None:
        self.name = name  # as operators say it: prefill-0
        self.info, self.node, self.costs = info, node, costs
        self._scale = block_tokens // BLOCK_TOKENS
        self.down = False
        self.sequences = self.unread_requests = self.unread_tokens = 0
        self.full = False
        self.nic_free = 0.0
        self.version = 0
        self._seen: Candidate | None = None

    def changed(self) -> None:
        """Notes that what policies see of the worker is out of date."""
        self._seen = None

    def takes(self, tokens: int) -> bool:
        """Returns whether it is alive and could ever hold so many tokens."""
        return not self.down and self.costs.kv_tokens >= tokens

    def die(self, node: Any) -> None:
        """Drops all that was there; ``node`` is what comes back, and goes on counting."""
        for counted in ("busy", "generated", "read_tokens", "asked_tokens"):
            if hasattr(node, counted):
                setattr(node, counted, getattr(self.node, counted))
        self.node, self.down, self.full = node, True, False
        self.sequences = self.unread_requests = self.unread_tokens = 0
        self.version += 1
        self.changed()

    def candidate(self) -> Candidate:
        """Returns the worker as the policies see it."""
        if self._seen is None:
            leased = self.node.pool.snapshot_counts().leased * self._scale
            load = WorkerLoad(leased_pages=leased, step_curve=self.costs.curve, transfer_curve=self.costs.transfer)
            self._seen = Candidate(
                self.info, load, self.sequences, self.unread_requests, self.unread_tokens, self.full
            )
        return self._seen
