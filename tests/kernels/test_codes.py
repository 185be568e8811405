"""Weights of codes into a table: how near the kernel's int8 table is, and what parts are stacked to."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.linear.codes import E2M1_TWICE, LEAST, TOP, Codes, e2m1, nibbles, stack_codes, whole_table

# bitsandbytes' NF4 (https://arxiv.org/abs/2305.14314, appendix E).
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
    ]
)


def test_a_table_of_small_whole_numbers_is_exact() -> None:
    for numbers in (E2M1_TWICE, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)):
        table = torch.tensor(numbers, dtype=torch.float32)
        whole, unit = whole_table(table)
        assert torch.equal(whole * unit, table)


def test_nf4_is_off_by_four_thousandths_at_most() -> None:
    whole, unit = whole_table(NF4)
    assert float((whole * unit - NF4).abs().max()) < 0.004
    assert LEAST < int(whole.abs().max()) <= TOP


def test_codes_stand_for_scale_times_table() -> None:
    torch.manual_seed(0)
    codes, scales = torch.randint(0, 16, (70, 96), dtype=torch.uint8), (torch.rand(70, 3) + 0.5).half().float()
    packed = stack_codes([e2m1(codes, 32, scales)])
    assert packed is not None
    twice = torch.tensor(E2M1_TWICE)[codes.int()]
    assert torch.equal(packed.dequantized(), twice / 2 * scales.repeat_interleave(32, 1))


def test_parts_of_one_table_are_stacked_by_the_finest_group() -> None:
    parts = [Codes(torch.full((64, 64), 15, dtype=torch.uint8), NF4, g, torch.ones(64, 64 // g)) for g in (32, 64)]
    packed = stack_codes(parts)
    assert packed is not None
    assert (packed.n, packed.group) == (128, 32)
    assert packed.dequantized() == pytest.approx(torch.ones(128, 64), abs=1e-3)


def test_parts_of_different_tables_have_no_common_form() -> None:
    codes, ones = torch.zeros((64, 32), dtype=torch.uint8), torch.ones(64, 1)
    assert stack_codes([Codes(codes, NF4, 32, ones), Codes(codes, -NF4, 32, ones)]) is None


def test_nibbles_come_in_either_order() -> None:
    packed = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    assert nibbles(packed).tolist() == [[1, 2, 3, 4]]
    assert nibbles(packed, first_high=True).tolist() == [[2, 1, 4, 3]]
