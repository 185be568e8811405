"""Chooses how many drafts of each sequence one step verifies, for the most tokens per second. Pure.

Knows nothing of who drafts, nor of how chances and costs are estimated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Least relative gain for which drafts are verified: costs are known to some percent, and users notice long steps.
MARGIN = 0.02


def best_depths(
    chances: Sequence[Sequence[float]], sequences: int, seconds: NDArray[np.float64], limit_s: float = 0.0
) -> list[int]:
    """Returns how many drafts of each sequence to verify, for the most expected tokens per second.

    ``chances[i]`` (never rising) are the probabilities that each draft of sequence i and all before it are
    accepted. Each of ``sequences`` sequences gets one token in any case. ``seconds[k]`` is the duration of a step
    with k drafts in total, and its length limits k; k with more than ``limit_s`` seconds are excluded unless that
    is 0. If the gain is less than ``MARGIN``, none are verified.

    As chances never rise, the best k drafts are the k largest chances, and they are a prefix of each draft. The
    same holds for trees' nodes sorted by chance, because a node's is never above its parent's.
    """
    flat = np.concatenate([np.asarray(one, np.float64) for one in chances]) if chances else np.empty(0)
    most = min(len(flat), len(seconds) - 1)
    order = np.argsort(-flat, kind="stable")[:most]
    tokens = sequences + np.concatenate(([0.0], np.cumsum(flat[order])))
    rates = tokens / seconds[: most + 1]
    if limit_s:
        rates[1:][seconds[1 : most + 1] > limit_s] = 0.0
    best = int(np.argmax(rates))
    taken = order[: best if rates[best] >= (1.0 + MARGIN) * rates[0] else 0]
    ends = np.cumsum([len(one) for one in chances])
    return np.bincount(np.searchsorted(ends, taken, side="right"), minlength=len(chances)).tolist()
