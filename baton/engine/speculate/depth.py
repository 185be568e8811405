"""How many drafts of each sequence one step verifies: the choice that brings most tokens per second. Pure.

Knows nothing of who drafts, nor how chances and costs came about.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# What drafts must bring to be verified at all. Costs are known to some percent, and longer steps are felt.
MARGIN = 0.02


def best_depths(
    chances: Sequence[Sequence[float]], sequences: int, seconds: NDArray[np.float64], limit_s: float = 0.0
) -> list[int]:
    """Returns how many drafts of each sequence to verify.

    ``chances[i]`` (never rising) are those of sequence i's drafts, all before each included. ``sequences`` get a
    token each anyway. ``seconds[k]`` is the step's time with k drafts in all, and its length says how many there
    may be; those that take it above ``limit_s``, where that isn't 0, are left out. Where the best choice brings
    less than ``MARGIN`` more than none, none are verified.

    As chances never rise, the best k drafts are the k largest chances, and they are a beginning of each draft. So
    they are of trees' nodes in the order of their chances: a node's is never above its parent's.
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
