"""Methods beside rounding to the nearest: outputs are nearer, and what must hold exactly does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.protos.errors import ConfigError
from baton.quantize.grids import IntGrid, to_nearest
from baton.quantize.methods import awq, inverse_factor, smoothquant
from baton.quantize.methods.gptq import gptq
from baton.quantize.methods.inverse_factor import InverseFactor
from baton.quantize.stats import KEPT, ActivationStats, output_error

GRID = IntGrid(4, 32)


@pytest.fixture
def rows() -> Tensor:
    """Inputs that go together and differ in size, as a model's do."""
    mixed = torch.randn(600, 64) @ torch.randn(64, 128)
    return mixed * torch.logspace(-1, 1, 128)[torch.randperm(128)]


@pytest.fixture
def stats(rows: Tensor) -> ActivationStats:
    found = ActivationStats(128, len(rows))
    for part in rows.split(100):
        found.add(part)
    return found


def test_stats_are_those_of_all_rows(rows: Tensor, stats: ActivationStats) -> None:
    assert torch.allclose(stats.hessian, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-4)
    assert torch.allclose(stats.mean_abs, rows.abs().mean(0), rtol=1e-4)
    assert torch.equal(stats.most, rows.abs().amax(0))
    assert KEPT <= len(stats.rows) <= len(rows)
    mean = stats.hessian.clone()
    stats.add(rows)
    assert torch.allclose(stats.hessian, mean, rtol=1e-4, atol=1e-4), "it goes on after it was asked"
    assert stats.divided(torch.ones(128)) is stats
    halves = stats.divided(torch.full((128,), 2.0))
    assert torch.allclose(halves.hessian * 4, stats.hessian)


@pytest.mark.parametrize("settings", [{}, {"act_order": False}, {"regroup": True}], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_leaves_a_fraction_of_the_error(
    stats: ActivationStats, settings: dict[str, bool], symmetric: bool
) -> None:
    weight, grid = torch.randn(48, 128), GRID._replace(symmetric=symmetric)
    found = gptq(weight, stats.hessian.clone(), grid, **settings).values()
    nearest = to_nearest(weight, grid).values()
    assert output_error(found - weight, stats.hessian) < 0.5 * output_error(nearest - weight, stats.hessian)


def test_gptq_rounds_some_rows_at_a_time_to_the_same_numbers(
    stats: ActivationStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(48, 128)
    whole = gptq(weight, stats.hessian.clone(), GRID)
    monkeypatch.setattr("baton.quantize.methods.gptq.ROWS", 20)
    some = gptq(weight, stats.hessian, GRID)
    assert (some.q == whole.q).float().mean() > 0.99
    assert torch.equal(some.scales, whole.scales)


@pytest.mark.parametrize("block", [20, 48, 128])
def test_the_factor_is_that_of_the_inverse_hessian(
    block: int, stats: ActivationStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inverse_factor, "BLOCK", block)
    order, hessian = torch.randperm(128), stats.hessian.double()
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(128)
    wanted = torch.linalg.cholesky(torch.linalg.inv(damped[order][:, order]), upper=True).float()
    found = InverseFactor(stats.hessian.clone(), order)
    assert torch.allclose(found.rows(0, 20), wanted[:20], rtol=1e-2, atol=1e-4)
    assert torch.allclose(found.rows(20, 40), wanted[20:40, 20:], rtol=1e-2, atol=1e-4)
    assert torch.allclose(found.rows(120, 128), wanted[120:, 120:], rtol=1e-2, atol=1e-4)


def test_a_hessian_that_is_not_positive_definite_is_damped_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse_factor, "BLOCK", 16)
    mixed = torch.randn(64, 64)
    hessian = mixed + mixed.T
    hessian.diagonal().copy_(torch.rand(64) + 0.1)
    mean = float(hessian.diagonal().mean())
    identity, tries = torch.eye(64), [inverse_factor.DAMP * 10**step for step in range(inverse_factor.TRIES)]
    damp = next(d * mean for d in tries if float(torch.linalg.eigvalsh(hessian + d * mean * identity)[0]) > 0)
    wanted = torch.linalg.cholesky(torch.linalg.inv((hessian + damp * identity).double()), upper=True).float()
    found = InverseFactor(hessian.clone(), torch.arange(64))
    assert damp > tries[0] * mean
    assert torch.allclose(found.rows(0, 64), wanted, rtol=1e-3, atol=1e-5)


def test_the_factor_lies_in_the_hessians_memory(stats: ActivationStats) -> None:
    hessian = stats.hessian
    assert InverseFactor(hessian, torch.randperm(128)).rows(0, 128).flip(0, 1).equal(hessian)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_inputs_that_are_not_finite_are_refused_by_the_weight(bad: float) -> None:
    stats = ActivationStats(64, 8)
    rows = torch.randn(8, 64)
    rows[3, 7] = bad
    stats.add(rows)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.o\.weight: the inputs of this weight are NaN"):
        stats.require_finite("model.layers.0.o.weight")


def test_moments_are_whole_where_they_are_summed_in_strips(
    rows: Tensor, stats: ActivationStats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.quantize.stats.STRIP", 48)
    strips = ActivationStats(128, len(rows))
    strips.add(rows[:100])
    assert torch.equal(strips.hessian, strips.hessian.T)
    strips.add(rows[100:])
    assert torch.allclose(strips.hessian, stats.hessian, rtol=1e-4, atol=1e-4)
    halves = strips.divided(torch.full((128,), 2.0))
    assert torch.allclose(halves.hessian * 4, stats.hessian, rtol=1e-4, atol=1e-4)


def test_gptq_is_rounding_to_the_nearest_where_inputs_do_not_go_together() -> None:
    weight = torch.randn(16, 64)
    assert torch.equal(gptq(weight, torch.eye(64), GRID).values(), to_nearest(weight, GRID).values())


def test_an_input_that_never_comes_costs_nothing_and_breaks_nothing(rows: Tensor) -> None:
    rows[:, 5] = 0
    stats = ActivationStats(128, len(rows))
    stats.add(rows)
    assert bool(torch.isfinite(gptq(torch.randn(8, 128), stats.hessian, GRID).values()).all())


def test_groups_that_follow_the_order_say_whose_each_input_is(stats: ActivationStats) -> None:
    heaviest = stats.hessian.diagonal().topk(32).indices
    found = gptq(torch.randn(8, 128), stats.hessian, GRID, regroup=True)
    assert found.groups_of is not None
    assert sorted(found.groups_of.tolist()) == sorted(i // 32 for i in range(128))
    assert not found.groups_of[heaviest].any()


def test_awqs_scales_and_ranges_each_leave_less(stats: ActivationStats) -> None:
    weight, grid = torch.randn(48, 128), GRID._replace(symmetric=False)
    nearest = output_error(to_nearest(weight, grid).values() - weight, stats.hessian)
    scales = awq.best_scales(weight, stats, grid, lambda s: s)
    scaled = to_nearest(weight * scales, grid).values() / scales
    clipped = awq.clipped(weight * scales, stats.divided(scales).hessian, grid).values() / scales
    errors = [output_error(off - weight, stats.hessian) for off in (scaled, clipped)]
    assert errors[1] <= errors[0] < nearest


@pytest.mark.parametrize("sign", [1, -1])
def test_awq_clips_each_end_of_a_range_by_itself(sign: int) -> None:
    weight = torch.rand(16, 128) - 0.5
    weight[:, ::32] = 0.9 * sign  # one input of each group is far out at one end
    hessian = torch.eye(128)
    hessian[range(0, 128, 32), range(0, 128, 32)] = 1e-4  # and hardly ever comes
    grid = GRID._replace(symmetric=False)
    least = min(
        output_error(
            to_nearest(weight, grid, grid.ranged(weight.view(16, 4, 32), share, share)).values() - weight, hessian
        )
        for share in awq.CLIPS
    )
    assert output_error(awq.clipped(weight, hessian, grid).values() - weight, hessian) < 0.7 * least


def test_smoothquant_moves_outliers_into_the_weight(rows: Tensor, stats: ActivationStats) -> None:
    weight, grid = torch.randn(48, 128), IntGrid(8, 0, wide=True)
    scales = smoothquant.best_scales(weight, stats, grid, lambda s: s)
    exact = rows @ weight.T

    def error(by: Tensor) -> float:
        found = smoothquant.by_token(rows / by) @ to_nearest(weight * by, grid).values().T
        return float((found - exact).square().sum())

    assert error(scales) < 0.7 * error(torch.ones(128))
