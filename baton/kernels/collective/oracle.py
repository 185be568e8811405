"""Reference results of the collectives, computed from the data of all ranks in one process.

Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def all_reduce(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the ranks' parts, added in the order of the ranks in their own dtype."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def all_gather(parts: Sequence[Tensor]) -> Tensor:
    """Returns the ranks' parts, each (n,), concatenated."""
    return torch.cat(list(parts))


def all_to_all(parts: Sequence[Tensor], rank: int) -> Tensor:
    """Returns what ``rank`` receives, (ranks, n), if rank i sends ``parts[i]`` (ranks, n)."""
    return torch.stack([part[rank] for part in parts])
