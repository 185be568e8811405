"""Weights whose rows have several orders of inputs, put together and taken apart: each row keeps its values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.backends.ranks.experts import _copy
from baton.kernels.linear.integers import Integers, packed_of, values_of
from baton.kernels.linear.packed import PackedWeight, beside, one_of, own_rows

INPUTS, GROUP = 64, 32


def integers(rows: int, seed: int, is_ordered: bool = True) -> Integers:
    """A weight of 4 bits with zero points, whose order is the seed's."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randint(-8, 8, (rows, INPUTS), dtype=torch.int8, generator=draw)
    scales, mins = (torch.rand(rows, INPUTS // GROUP, generator=draw).half().float() for _ in range(2))
    order = torch.randperm(INPUTS, generator=draw).int() if is_ordered else None
    return Integers(q, 4, GROUP, scales, mins, order=order)


def packed(parts: list[Integers]) -> PackedWeight:
    found = packed_of(parts)
    assert found is not None
    return found


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool(torch.allclose(found, wanted, atol=2e-2))


@pytest.mark.parametrize("rows", [(96, 32, 32), (64, 64), (16, 8, 200), (128, 1)], ids=str)
def test_parts_stacked_keep_their_orders(rows: tuple[int, ...]) -> None:
    parts = [integers(n, seed, is_ordered=seed != 1) for seed, n in enumerate(rows)]
    assert near(packed(parts).dequantized(), torch.cat([values_of(part) for part in parts]))


def test_parts_of_one_order_have_one() -> None:
    part = integers(32, 0)
    found = packed([part, part._replace(q=part.q.neg().clamp(max=7))])
    assert found.table is not None
    assert found.table.shape == (INPUTS,)


@pytest.mark.parametrize("ranges", [[(0, 48), (96, 112)], [(10, 11)], [(64, 160)], [(128, 160), (0, 64)]], ids=str)
def test_rows_taken_out_keep_their_orders(ranges: list[tuple[int, int]]) -> None:
    whole = packed([integers(96, 0), integers(32, 1), integers(32, 2)])
    wanted = torch.cat([whole.dequantized()[begin:end] for begin, end in ranges])
    found = own_rows(whole, ranges)
    assert torch.equal(found.dequantized(), wanted)
    assert torch.equal(own_rows(found, [(0, found.n)]).dequantized(), wanted)


def test_experts_keep_their_orders_beside_each_other_and_where_one_takes_anothers_place() -> None:
    """A gate and an up of two orders, an expert of one, and one whose inputs are in order."""
    each = [packed([integers(48, 0), integers(48, 1)]), packed([integers(96, 2)]), packed([integers(96, 3, False)])]
    whole = beside(each)
    assert whole is not None
    wanted = [own.dequantized() for own in each]
    assert all(torch.equal(one_of(whole, at, 3, 96).dequantized(), wanted[at]) for at in range(3))
    places = own_rows(whole, [(128 * at, 128 * (at + 1)) for at in (1, 1)])
    for at in (2, 0):
        _copy(own_rows(whole, [(128 * at, 128 * (at + 1))]), places, 1, 2)
        assert torch.equal(one_of(places, 1, 2, 96).dequantized(), wanted[at])
        assert torch.equal(one_of(places, 0, 2, 96).dequantized(), wanted[1])
