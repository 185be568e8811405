"""What is paid to runs of tokens is what a softmax over all keys gives them, head by head."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.page_scores.reference import page_scores


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_each_run_gets_the_sum_of_its_tokens_probabilities(softcap: float) -> None:
    queries, tokens, heads, kv_heads = 5, 70, 4, 2
    q, keys = torch.randn(queries, heads, 8), torch.randn(tokens, kv_heads, 8)
    wanted = torch.zeros(4)
    for row in range(queries):
        seen = tokens - queries + row + 1
        for head in range(heads):
            scores = keys[:seen, head // 2] @ q[row, head] * 0.3
            paid = (softcap * torch.tanh(scores / softcap) if softcap else scores).softmax(0)
            wanted += paid[:64].view(4, 16).sum(1)
    assert torch.allclose(page_scores(q, keys, 0.3, softcap), wanted, atol=1e-5)
    assert float(wanted.sum()) < queries * heads
