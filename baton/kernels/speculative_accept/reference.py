"""Decides how many drafted tokens are accepted, in float64.

Knows nothing of who drafted, of seeds or of KV. There are two ways. By choice: the target chose a token at every
position with that position's random number, and a draft is accepted while it equals that choice; the tokens are
those of a run without drafts. By rejection (Leviathan et al., 2023, https://arxiv.org/abs/2211.17192): a draft is
accepted if ``accept`` < p / q, else a token is drawn from the excess of p over q; each token then has the target's
distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST = 16  # drafts of one sequence that are looked at, at most


class Rejection(NamedTuple):
    """The inputs of rejection sampling for one sequence of ``count`` drafts."""

    target: Tensor  # (count + 1, vocab) the target's logits after penalties and masks
    proposed: Tensor | None  # (count, vocab) the drafter's probabilities; None if its drafts are certain
    accept: Tensor  # (count,) uniform float64
    draw: Tensor  # (count + 1,) uniform float64
    temperature: float  # 0: only the likeliest token is accepted


def speculative_accept(tokens: Tensor, by: Tensor | Rejection) -> tuple[int, int]:
    """Returns the number of accepted tokens of ``tokens`` (count,), and the token after them.

    ``by`` are the target's choices (count + 1,) or a ``Rejection``. The token is -1 if its row has no finite
    maximum.
    """
    count = min(len(tokens), MOST)
    for place in range(count):
        stands, instead = _judged(int(tokens[place]), place, by)
        if not stands:
            return place, instead
    return count, _judged(-1, count, by)[1]


def _judged(token: int, place: int, by: Tensor | Rejection) -> tuple[bool, int]:
    """Returns whether the draft is accepted at ``place``, and the target's token if it isn't; ``token`` -1 is no
    draft.
    """
    if isinstance(by, Tensor):
        return token >= 0 and int(by[place]) == token, int(by[place])
    row = by.target[place].double()
    best = row.max()
    if not bool(torch.isfinite(best)):
        return False, -1
    vocab, known = len(row), 0 <= token < len(row)
    if by.temperature <= 0:
        return token == int(row.argmax()), int(row.argmax())
    p = ((row - best) / by.temperature).exp()
    p /= p.sum()
    if token < 0:
        return False, _drawn(p, float(by.draw[place]))
    q = torch.zeros(vocab, dtype=torch.float64)
    if by.proposed is not None:
        q = by.proposed[place].double()
    elif known:
        q[token] = 1.0
    if known and float(by.accept[place]) * float(q[token]) < float(p[token]):
        return True, token
    rest = (p - q).clamp_min(0)
    return False, _drawn(rest if float(rest.sum()) > 0 else p, float(by.draw[place]))


def _drawn(mass: Tensor, uniform: float) -> int:
    """Returns the first token whose cumulative mass exceeds uniform x total."""
    reached = mass.cumsum(0)
    at = int(torch.searchsorted(reached, uniform * reached[-1:], right=True))
    return min(at, int(mass.nonzero()[-1]))
