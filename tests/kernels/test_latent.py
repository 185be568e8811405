"""Latent attention and grouped routing against what their papers write out, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.kernels.combine.reference import combine
from baton.kernels.latent_attention.reference import latent_attention
from baton.kernels.moe.reference import moe
from baton.kernels.route.reference import route

PLAIN, ROTARY, VALUE, RANK, HEADS = 12, 6, 10, 20, 3


@pytest.mark.parametrize(("queries", "start"), [(1, 0), (1, 40), (7, 30), (37, 0)])
def test_absorbed_projections_give_what_expanded_keys_and_values_give(queries: int, start: int) -> None:
    q = torch.randn(queries, HEADS, PLAIN + ROTARY)
    kept = torch.randn(start + queries, RANK + ROTARY)
    expand = torch.randn(HEADS, PLAIN + VALUE, RANK) / RANK**0.5
    full = torch.einsum("hpr,tr->htp", expand.double(), kept[:, :RANK].double())
    shared = kept[None, :, RANK:].double().expand(HEADS, -1, -1)
    keys = torch.cat((full[..., :PLAIN], shared), -1)
    hidden = torch.arange(len(kept))[None] > torch.arange(start, start + queries)[:, None]
    scores = torch.einsum("qhp,htp->hqt", q.double(), keys) * 0.3
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    wanted = torch.einsum("hqt,htv->qhv", weights, full[..., PLAIN:])
    found = latent_attention(q, kept, start, expand, RANK, 0.3)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6


def test_a_bias_chooses_experts_but_does_not_weigh_them() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 3.0, 0.0, 2.0])
    found, factor = route(logits, bias, "sigmoid", 2, 1, 1, 1, True, 2.5)
    assert found.isfinite().tolist() == [[False, True, False, True]]
    assert (found.softmax(-1) * factor)[0].tolist() == pytest.approx([0, 1.25, 0, 1.25])


def test_experts_outside_the_best_groups_are_never_chosen() -> None:
    logits = torch.tensor([[5.0, -9.0, 4.0, 4.0, 1.0, 1.0]])  # of three groups the second has the two best together
    found, _ = route(logits, None, "sigmoid", 2, 3, 1, 2, True, 1.0)
    assert found.isfinite().tolist() == [[False, False, True, True, False, False]]
    found, _ = route(logits, None, "softmax", 2, 3, 1, 1, True, 1.0)
    assert found.isfinite().tolist() == [[True, True, False, False, False, False]]


def test_routed_and_shared_experts_add_up_to_the_plain_sum() -> None:
    x, logits = torch.randn(5, 16), torch.randn(5, 6)
    gate_up, down = torch.randn(6, 24, 16), torch.randn(6, 16, 12)
    shared, gate = torch.randn(5, 16), torch.randn(5, 1)
    found, factor = route(logits, None, "softmax", 2, 1, 1, 1, False, 1.7)
    mixed = combine(moe(x, found, gate_up, down, 2, True), factor, shared, gate)
    scores = logits.softmax(-1)
    wanted = gate.sigmoid() * shared
    for row in range(5):
        for expert in scores[row].topk(2).indices.tolist():
            up, gated = x[row] @ gate_up[expert, 12:].T, F.silu(x[row] @ gate_up[expert, :12].T)
            wanted[row] += 1.7 * scores[row, expert] * ((gated * up) @ down[expert].T)
    assert torch.allclose(mixed, wanted, rtol=1e-4, atol=1e-4)
