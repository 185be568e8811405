"""Builds masks of the tokens that may be chosen next, as boolean arrays (vocab,). Torch-free.

Knows nothing of logits or grammars' insides. ``Allowed`` is a function from the vocabulary's size to a mask, so
that masks are only made for rows that choose a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Allowed = Callable[[int], Mask]


def only(token_ids: Sequence[int]) -> Allowed:
    """Returns a function that makes masks of a vocabulary's size in which ``token_ids`` alone are allowed; ids out
    of range are ignored.
    """
    return partial(_only, token_ids)


def without(allowed: Allowed, banned: Sequence[int]) -> Allowed:
    """Returns ``allowed`` with the ids ``banned`` cleared. If no token remained, ``allowed``'s own mask is used, so
    that an answer can always continue.
    """
    return partial(_without, allowed, banned) if banned else allowed


def completing(words: Sequence[Sequence[int]], outputs: Sequence[int]) -> tuple[int, ...]:
    """Returns the token ids that would complete one of ``words`` (sequences of token ids) if chosen after
    ``outputs``.
    """
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
