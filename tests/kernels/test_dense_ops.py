"""embedding, linear, rms_norm, swiglu, lm_head against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.registry import kernels

K = kernels()


def test_embedding_picks_rows() -> None:
    table = torch.randn(7, 5)
    assert torch.equal(K.embedding(torch.tensor([3, 0, 3]), table), table[[3, 0, 3]])


def test_linear_adds_its_bias() -> None:
    x, weight, bias = torch.randn(4, 6), torch.randn(3, 6), torch.randn(3)
    wanted = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(K.linear(x, weight, bias).double(), wanted, atol=1e-5, rtol=1e-5)


def test_a_row_alone_and_in_company_differ_by_no_more_than_the_rounding_of_a_float32_sum() -> None:
    x, weight = torch.randn(132, 300), torch.randn(404, 300)
    whole = K.linear(x, weight)
    bound = (
        2 * x.shape[1] * torch.finfo(torch.float32).eps * (x.abs() @ weight.abs().T)
    )  # holds for any order of the sum
    for rows in (1, 3, 4, 8, 12, 20, 64, 100):
        assert ((K.linear(x[:rows], weight) - whole[:rows]).abs() <= bound[:rows]).all()


@pytest.mark.parametrize("delta", [None, torch.randn(3, 8)])
def test_rms_norm_adds_then_norms(delta: torch.Tensor | None) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    summed, normed = K.rms_norm(x, delta, weight, 1e-5)
    wide = (x if delta is None else x + delta).double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(summed.double(), wide)
    torch.testing.assert_close(normed.double(), wanted, atol=1e-5, rtol=1e-5)


def test_rms_norm_of_bfloat16_takes_its_mean_in_float32() -> None:
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    _, normed = K.rms_norm(x, None, torch.ones(4096, dtype=torch.bfloat16), 0.0)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, torch.ones_like(normed))


def test_swiglu_gates_the_second_half_by_the_first() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    wanted = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(K.swiglu(torch.cat((gate, up), -1)), wanted)


def test_lm_head_computes_the_asked_rows_only_in_float32() -> None:
    x, delta = torch.randn(6, 8), torch.randn(6, 8)
    norm, weight = torch.rand(8), torch.randn(11, 8)
    rows = torch.tensor([5, 2])
    logits = K.lm_head(x.bfloat16(), delta.bfloat16(), rows, norm.bfloat16(), 1e-5, weight.bfloat16())
    assert logits.dtype == torch.float32
    assert logits.shape == (2, 11)
    _, every = K.rms_norm(x, delta, norm, 1e-5)
    torch.testing.assert_close(K.lm_head(x, delta, rows, norm, 1e-5, weight), (every @ weight.T)[rows])
