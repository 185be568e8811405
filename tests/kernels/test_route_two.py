"""SparseMixer's choice of two experts: the weights written out for one row, and what comes of ties in distance."""

from __future__ import annotations

import math

import pytest
import torch

from baton.kernels.route_two.reference import route_two


def test_each_expert_weighs_as_in_a_softmax_over_those_near_it() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 1.2, 0.1]])
    found, factor = route_two(logits, 0.1)  # near: within a fifth of the larger size
    first = 1 / (1 + math.exp(-0.1))  # 2.0 beside 1.9; 1.2 is 0.8 / 2.0 away
    assert (found.isfinite()).tolist() == [[True, True, False, False, False]]
    weights = found.softmax(-1) * factor
    assert weights[0, :2].tolist() == pytest.approx([first, 1.0])  # 1.2 is 0.7 / 1.9 from the second


def test_all_experts_are_near_with_a_large_number_and_weights_are_those_of_plain_softmaxes() -> None:
    logits = torch.randn(6, 5)
    found, factor = route_two(logits, 1e9)
    weights, best = found.softmax(-1) * factor, logits.topk(2, -1).indices
    for row, (one, two) in enumerate(best.tolist()):
        without = logits[row].clone()
        without[one] = -torch.inf
        assert float(weights[row, one]) == pytest.approx(float(logits[row].softmax(-1)[one]), rel=1e-5)
        assert float(weights[row, two]) == pytest.approx(float(without.softmax(-1)[two]), rel=1e-5)
