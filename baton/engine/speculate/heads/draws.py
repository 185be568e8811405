"""Chooses drafts from logits as the target would: by the request's temperature and the position's own number.

Knows nothing of heads or of models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.plan import SampleSpec
from baton.engine.sampling import COLDEST, choose
from baton.engine.speculate.draft import GRADES, Text
from baton.engine.speculate.draft_model import plain_sampling
from baton.kernels.registry import kernels


def drawn(logits: Tensor, texts: Sequence[Text], ahead: int) -> list[int]:
    """Returns a token for each row of ``logits`` (texts, vocab): what follows ``ahead`` drafts of its text."""
    found = logits.argmax(-1).tolist()
    random = [row for row, text in enumerate(texts) if text.request.sampling.temperature >= COLDEST]
    if random:
        specs = [_spec(texts[row], ahead) for row in random]
        chosen = choose(logits[random], random, specs, kernels().sample)
        for row, one in zip(random, chosen, strict=True):
            found[row] = one.token_id
    return found


def grades(logits: Tensor) -> list[int]:
    """Returns each row's grade: how likely its likeliest token is, in eighths."""
    best = torch.exp(logits.amax(-1) - logits.logsumexp(-1))
    return [min(GRADES - 1, int(GRADES * p)) for p in best.tolist()]


def _spec(text: Text, ahead: int) -> SampleSpec:
    request, position = text.request, len(text.tokens) + ahead
    return SampleSpec(plain_sampling(request.sampling), request.choice, position, (), request.prompt_tokens)
