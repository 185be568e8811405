"""The limits that a decode engine is started with. Torch-free.

Knows nothing of who keeps them.
"""

from __future__ import annotations

from typing import NamedTuple


class DecodeLimits(NamedTuple):
    """Limits of a decode engine's steps and leases."""

    max_batch: int = 64  # sequences that advance in a step, at most
    chunk_tokens: int = 512  # prompt tokens that a step computes, at most
    ttl_s: float = 30.0  # seconds that a lease lasts without progress
    itl_target_s: float = 0.0  # seconds that a step should take at most; 0 for no target
    pace_s: float = 0.0  # seconds between steps' beginnings while a prefill engine shares the cores; 0: none
