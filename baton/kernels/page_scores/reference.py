"""Computes how much attention the last tokens of a sequence pay to each run of 16 before them. Knows nothing of
pages.

SnapKV (https://arxiv.org/abs/2404.14469) chooses by it which of the prompt's tokens an answer still attends to, H2O
(https://arxiv.org/abs/2306.14048) which of all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

RUN = 16  # tokens


def page_scores(q: Tensor, keys: Tensor, scale: float, softcap: float = 0.0, every: bool = False) -> Tensor:
    """Returns the attention that each full run of 16 tokens before the queries gets, summed over all queries and
    heads; with ``every`` that of all runs, the queries' own included.

    q (queries, heads, head_dim) are the last of the tokens of keys (tokens, kv_heads, head_dim), both rotated to
    their positions; each query sees the keys up to its own. A score s becomes softcap x tanh(s / softcap) if
    ``softcap`` isn't 0. The result is float32, ((tokens - queries) // 16,), or with ``every`` (tokens / 16,),
    rounded up.
    """
    (count, heads, _), (tokens, kv_heads, _) = q.shape, keys.shape
    runs = -(-tokens // RUN) if every else (tokens - count) // RUN
    hidden = torch.arange(tokens)[None] > torch.arange(tokens - count, tokens)[:, None]
    total = torch.zeros(runs)
    for head in range(kv_heads):  # one after the other, because a long prompt's scores fill the memory
        own = q[:, head * heads // kv_heads : (head + 1) * heads // kv_heads].float().transpose(0, 1)
        scores = own @ keys[:, head].float().T * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        paid = scores.masked_fill(hidden, -torch.inf).softmax(-1).sum((0, 1))
        total += functional.pad(paid[: runs * RUN], (0, max(0, runs * RUN - tokens))).view(runs, RUN).sum(1)
    return total
