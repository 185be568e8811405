"""Says which tokens may be chosen now, as boolean arrays (vocab,). Torch-free.

Knows nothing of logits or grammars' insides. A mask is a function of the vocabulary's size, so that it costs only
where a token is really chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Allowed = Callable[[int], Mask]


def only(token_ids: Sequence[int]) -> Allowed:
    """Returns a mask that allows ``token_ids`` alone."""
    return partial(_only, token_ids)


def without(allowed: Allowed, banned: Sequence[int]) -> Allowed:
    """Returns ``allowed`` less ``banned``. Where that leaves nothing ``allowed`` wins: an answer must be able to go
    on.
    """
    return partial(_without, allowed, banned) if banned else allowed


def completing(words: Sequence[Sequence[int]], outputs: Sequence[int]) -> tuple[int, ...]:
    """Returns the last id of each of ``words`` that ``outputs`` ends with but for that id."""
    return tuple(word[-1] for word in words if _ends_with(outputs, word[:-1]))


def _only(token_ids: Sequence[int], vocab_size: int) -> Mask:
    mask = np.zeros(vocab_size, np.bool_)
    mask[[i for i in token_ids if 0 <= i < vocab_size]] = True
    return mask


def _without(allowed: Allowed, banned: Sequence[int], vocab_size: int) -> Mask:
    mask = allowed(vocab_size)
    left = mask & ~_only(banned, vocab_size)
    return left if left.any() else mask


def _ends_with(outputs: Sequence[int], start: Sequence[int]) -> bool:
    return len(outputs) >= len(start) and tuple(outputs[len(outputs) - len(start) :]) == tuple(start)
