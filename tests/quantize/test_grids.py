"""Tests grids: the nearest number is taken, ranges hold their groups, and published arithmetic comes out."""

from __future__ import annotations

import pytest
import torch

from baton.quantize.grids import E2M1, NF4, Fp8Grid, Grid, IntGrid, MxGrid, TableGrid, to_nearest

GRIDS: dict[str, tuple[Grid, float]] = {  # and the largest error, as a share of a group's largest magnitude
    "int4": (IntGrid(4, 32), 1 / 14),
    "int4 asymmetric": (IntGrid(4, 32, symmetric=False), 1 / 13),
    "int8 by row": (IntGrid(8, 0, wide=True), 1 / 253),
    "nf4": (TableGrid(torch.tensor(NF4), 64), 0.16),
    "mxfp4": (MxGrid(), 1 / 3),
    "fp8": (Fp8Grid(), 1 / 16),
}


@pytest.mark.parametrize("name", list(GRIDS))
def test_no_weight_is_further_off_than_its_grid_allows(name: str) -> None:
    grid, most = GRIDS[name]
    weight = torch.randn(16, 128)
    found = to_nearest(weight, grid)
    parts = weight.view(16, -1, grid.group or 128)
    off = (found.values().view_as(parts) - parts).abs().amax(-1)
    assert bool((off <= most * parts.abs().amax(-1) + 1e-7).all())
    assert int(found.q.min()) >= 0
    assert int(found.q.max()) < 1 << grid.bits


@pytest.mark.parametrize("name", [name for name in GRIDS if name != "int4"])  # whose range ends between two numbers
def test_what_is_rounded_already_stays(name: str) -> None:
    grid, _ = GRIDS[name]
    once = to_nearest(torch.randn(8, 128), grid)
    again = to_nearest(once.values(), grid).values()
    assert torch.allclose(again, once.values(), rtol=2e-3, atol=1e-6)


def test_a_searched_range_is_never_worse() -> None:
    weight = torch.randn(32, 128) ** 3
    plain, searched = (to_nearest(weight, IntGrid(4, 32, search=search)).values() for search in (False, True))
    assert float((searched - weight).square().sum()) < float((plain - weight).square().sum())


def test_mxfp4_shares_a_power_of_two_and_its_numbers_are_e2m1s() -> None:
    found = to_nearest(torch.randn(4, 64), MxGrid())
    assert torch.equal(torch.log2(found.scales), torch.log2(found.scales).round())
    assert found.codebook is not None
    assert found.codebook.tolist() == list(E2M1)
    exact = torch.tensor([[6.0, -3.0, 0.5, *[0.0] * 29]]) * 2.0**-5
    assert torch.equal(to_nearest(exact, MxGrid()).values(), exact)


def test_a_group_of_zeros_stays_zero() -> None:
    for grid, _ in GRIDS.values():
        assert not to_nearest(torch.zeros(8, 128), grid).values().any()
