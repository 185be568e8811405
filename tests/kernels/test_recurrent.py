"""Recurrent ops against their recurrences written out token by token, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.gated_delta.reference import NORM_EPS, STRETCH, gated_delta
from baton.kernels.selective_scan.reference import convolve_by_taps, selective_scan
from baton.kernels.state_space.reference import state_space

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 2, 4, 6, 10, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gates = torch.rand(tokens, VALUE_HEADS), -3 * torch.rand(tokens, VALUE_HEADS)
    return torch.randn(tokens, CHANNELS), *gates, torch.randn(CHANNELS, KERNEL)


def token_by_token(mixed: Tensor, beta: Tensor, decay: Tensor, conv: Tensor) -> Tensor:
    mixed, beta, decay, conv = (x.double() for x in (mixed, beta, decay, conv))
    padded = F.pad(mixed, (0, 0, KERNEL - 1, 0))
    state, outs = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64), []
    for t in range(len(mixed)):
        row = F.silu((padded[t : t + KERNEL].T * conv).sum(1))
        q, k, v = row.split((KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM))
        q, k = (x.view(KEY_HEADS, KEY_DIM).repeat_interleave(VALUE_HEADS // KEY_HEADS, 0) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for x in (q, k))
        state = state * decay[t].exp()[:, None, None]
        found = torch.einsum("hkv,hk->hv", state, k)
        update = beta[t][:, None] * (v.view(VALUE_HEADS, VALUE_DIM) - found)
        state = state + k[:, :, None] * update[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q * KEY_DIM**-0.5))
    return torch.stack(outs)


CUTS = [(1,) * 9, (5, 1, 60), (STRETCH,), (STRETCH + 1, 3), (150, 1, 1, 40)]


@pytest.mark.parametrize("cuts", CUTS)
def test_a_gated_delta_rule_is_its_recurrence_however_the_tokens_are_cut(cuts: tuple[int, ...]) -> None:
    mixed, beta, decay, conv = inputs(sum(cuts))
    past, state = torch.zeros(1, CHANNELS, KERNEL - 1), torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    outs, at = [], 0
    for count in cuts:
        part = slice(at, at + count)
        outs.append(gated_delta(mixed[part], beta[part], decay[part], conv, past, state, KEY_HEADS))
        at += count
    wanted = token_by_token(mixed, beta, decay, conv)
    assert float((torch.cat(outs) - wanted).norm() / wanted.norm()) < 1e-5
    assert torch.equal(past[0], mixed[-(KERNEL - 1) :].T) or sum(cuts) < KERNEL


def test_a_gated_delta_rule_is_exact_where_some_tokens_leave_nothing_and_others_nearly_all() -> None:
    """Sums of the decays reach -3000 in a stretch, where the next float32 is 2e-4 away."""
    mixed, beta, decay, conv = inputs(3 * STRETCH)
    decay = decay * torch.where(torch.rand_like(decay) < 0.5, 1e-3, 60.0)
    past, state = torch.zeros(1, CHANNELS, KERNEL - 1), torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    found = gated_delta(mixed, beta, decay, conv, past, state, KEY_HEADS)
    wanted = token_by_token(mixed, beta, decay, conv)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("cuts", CUTS)
def test_a_state_space_layer_is_its_recurrence_however_the_tokens_are_cut(cuts: tuple[int, ...]) -> None:
    heads, head_dim, groups, size, tokens = 4, 5, 2, 7, sum(cuts)
    channels = heads * head_dim + 2 * groups * size
    mixed, conv, bias = torch.randn(tokens, channels), torch.randn(channels, KERNEL), torch.randn(channels)
    dt, fade, skip = torch.rand(tokens, heads), -3 * torch.rand(heads), torch.randn(heads)
    past, state = torch.zeros(1, channels, KERNEL - 1), torch.zeros(1, heads, head_dim, size)
    outs, at = [], 0
    for count in cuts:
        part = slice(at, at + count)
        outs.append(state_space(mixed[part], dt[part], fade, skip, conv, bias, past, state, groups))
        at += count
    padded, known, wanted = F.pad(mixed.double(), (0, 0, KERNEL - 1, 0)), torch.zeros_like(state[0]).double(), []
    for t in range(tokens):
        row = F.silu((padded[t : t + KERNEL].T * conv.double()).sum(1) + bias)
        x, b, c = row.split((heads * head_dim, groups * size, groups * size))
        b, c = (each.view(groups, size).repeat_interleave(heads // groups, 0) for each in (b, c))
        fed = dt[t][:, None, None] * x.view(heads, head_dim)[..., None] * b[:, None]
        known = (dt[t] * fade).double().exp()[:, None, None] * known + fed
        wanted.append(torch.einsum("hds,hs->hd", known, c) + skip[:, None] * x.view(heads, head_dim))
    exact = torch.stack(wanted)
    assert float((torch.cat(outs) - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("count", [1, 5])
def test_sequences_that_advance_together_do_so_as_each_would_alone(count: int) -> None:
    mixed, beta, decay, conv = inputs(3 * count)
    past, state = torch.randn(3, CHANNELS, KERNEL - 1), torch.randn(3, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    kept, outs = (past.clone(), state.clone()), []
    for at in range(3):
        part, own = slice(at * count, (at + 1) * count), slice(at, at + 1)
        outs.append(gated_delta(mixed[part], beta[part], decay[part], conv, past[own], state[own], KEY_HEADS))
    together = gated_delta(mixed, beta, decay, conv, *kept, KEY_HEADS)
    assert torch.allclose(together, torch.cat(outs), atol=1e-5)
    assert torch.allclose(kept[1], state, atol=1e-5)
    assert torch.equal(kept[0], past)


def test_a_selective_scan_is_its_recurrence() -> None:
    channels, size, tokens = 70, 11, 9
    x, dt, b, c = (torch.randn(2 * tokens, width) for width in (channels, channels, size, size))
    fade, skip = -3 * torch.rand(channels, size), torch.randn(channels)
    found = selective_scan(x, dt, b, c, fade, skip, torch.zeros(2, channels, size))
    known, wanted, steps = torch.zeros(channels, size).double(), [], F.softplus(dt.double())
    for t in range(tokens):
        known = (steps[t, :, None] * fade).exp() * known + (steps[t] * x[t])[:, None] * b[t]
        wanted.append((known * c[t]).sum(-1) + skip * x[t])
    assert float((found[:tokens] - torch.stack(wanted)).norm() / torch.stack(wanted).norm()) < 1e-5


def test_a_convolution_by_taps_is_the_convolution_and_keeps_the_last_rows() -> None:
    rows, weight, past = torch.randn(10, 6), torch.randn(6, KERNEL), torch.randn(2, 6, KERNEL - 1)
    whole = torch.cat((past, rows.view(2, 5, 6).transpose(1, 2)), -1)
    found = convolve_by_taps(rows, weight, past)
    assert torch.allclose(
        found, F.conv1d(whole, weight[:, None], groups=6).transpose(1, 2).flatten(0, 1), atol=1e-5
    )
    assert torch.equal(past, whole[..., -(KERNEL - 1) :])
