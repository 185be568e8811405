"""Chooses drafts from logits as the target would: by the request's temperature and the random number of the
position.

Knows nothing of heads or of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor

from baton.engine.plan import SampleSpec
from baton.engine.sampling import COLDEST, choose
from baton.engine.speculate.draft import GRADES, SequenceView
from baton.engine.speculate.draft_model import plain_sampling
from baton.kernels.registry import kernels


def drawn(logits: Tensor, texts: Sequence[SequenceView], ahead: int) -> list[int]:
    """Returns a token for each row of ``logits`` (texts, vocab), the one that follows ``ahead`` drafts of its
    text.
    """
    found = logits.argmax(-1).tolist()
    random = [row for row, text in enumerate(texts) if text.request.sampling.temperature >= COLDEST]
    if random:
        specs = [_spec(texts[row], ahead) for row in random]
        chosen = choose(logits[random], random, specs, kernels().sample)
        for row, one in zip(random, chosen, strict=True):
            found[row] = one.token_id
    return found


def may_branch(text: SequenceView) -> bool:
    """Returns whether the text is decoded greedily, so that several guesses at a place make sense; a random draw
    has one.
    """
    return text.request.sampling.temperature < COLDEST


def likeliest_paths(ids: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], most: int) -> list[list[int]]:
    """Returns the ``most`` likeliest paths of tokens, each after the shorter paths that it continues.

    ``ids[i]`` are the guesses for place i, the likeliest first, assumed independent of those before, and
    ``chances[i]`` are their probabilities.
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-chances[0][0], (0,))]
    found = list[list[int]]()
    while heap and len(found) < most:
        chance, path = heappop(heap)
        found.append([ids[place][rank] for place, rank in enumerate(path)])
        place, rank = len(path), path[-1] + 1
        if place < len(ids):
            heappush(heap, (chance * chances[place][0], (*path, 0)))
        if rank < len(ids[place - 1]):
            again = chance / chances[place - 1][rank - 1] * chances[place - 1][rank]
            heappush(heap, (again, (*path[:-1], rank)))
    return found


def grades(logits: Tensor) -> list[int]:
    """Returns each row's grade 0 … 7: the probability of its likeliest token in eighths."""
    best = torch.exp(logits.amax(-1) - logits.logsumexp(-1))
    return [min(GRADES - 1, int(GRADES * p)) for p in best.tolist()]


def _spec(text: SequenceView, ahead: int) -> SampleSpec:
    request, position = text.request, len(text.tokens) + ahead
    return SampleSpec(plain_sampling(request.sampling), request.choice, position, (), request.prompt_tokens)
