"""Chooses how many drafts of each sequence one step verifies, for the most tokens per second. Pure.

Knows nothing of who drafts, nor of how chances and costs are estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Least relative gain for which drafts are verified: costs are known to some percent.
MARGIN = 0.02
# Relative lengthening of a step that users don't feel. A step that is longer has to bring more than MARGIN, because
# the time between tokens that one waits for is the step's, however many it brings.
UNFELT = 0.02
FELT_MARGIN = 0.1  # share of tokens per second; below it a step lengthens by UNFELT at most


def best_depths(
    chances: Sequence[Sequence[float]], sequences: int, seconds: NDArray[np.float64], limit_s: float = 0.0
) -> list[int]:
    """Returns how many drafts of each sequence to verify, for the most expected tokens per second.

    ``chances[i]`` (never rising) are the probabilities that each draft of sequence i and all before it are
    accepted. Each of ``sequences`` sequences gets one token in any case. ``seconds[k]`` is the duration of a step
    with k drafts in total, and its length limits k; k with more than ``limit_s`` seconds are excluded unless that
    is 0. If the gain is less than ``FELT_MARGIN``, only as many as lengthen the step by ``UNFELT`` are verified; if
    it is less than ``MARGIN``, none.

    As chances never rise, the best k drafts are the k largest chances, and they are a prefix of each draft. The
    same holds for trees' nodes sorted by chance, because a node's is never above its parent's.
    """
    order = sorted(((one, at) for at, of in enumerate(chances) for one in of), key=lambda pair: -pair[0])
    plain_s, *longer_s = seconds[: len(order) + 1].tolist()
    felt_s, limit_s = (1.0 + UNFELT) * plain_s, limit_s or math.inf
    tokens, plain = float(sequences), sequences / plain_s
    best, unfelt = (plain, 0), (plain, 0)  # tokens per second, and the number of drafts
    for count, ((chance, _), step_s) in enumerate(zip(order, longer_s, strict=False), 1):
        if step_s > limit_s:
            break
        tokens += chance
        found = tokens / step_s, count
        best = max(best, found, key=_rate)
        if step_s <= felt_s:
            unfelt = best
    if best[0] < (1.0 + FELT_MARGIN) * plain:
        best = unfelt if unfelt[0] >= (1.0 + MARGIN) * plain else (plain, 0)
    depths = [0] * len(chances)
    for _, at in order[: best[1]]:
        depths[at] += 1
    return depths


def _rate(choice: tuple[float, int]) -> float:
    return choice[0]


def lengthened(seconds: NDArray[np.float64], drafts: int) -> float:
    """Returns the share of a step without drafts that ``drafts`` drafts add to it."""
    return float(seconds[min(drafts, len(seconds) - 1)] / seconds[0]) - 1.0


def cost(seconds: NDArray[np.float64], drafts: int, sequences: int) -> float:
    """Returns the tokens that ``drafts`` drafts have to bring in a step of ``sequences``, to be worth its longer
    duration.
    """
    extra = lengthened(seconds, drafts)
    margin = FELT_MARGIN * (1.0 + extra) if extra > UNFELT else 0.0
    return sequences * (extra + margin)
