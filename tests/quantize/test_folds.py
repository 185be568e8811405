"""Tests that factors which move into a norm can be undone by what reads it."""

from __future__ import annotations

import pytest
import torch

from baton.engine.program.program import Weight
from baton.quantize.folds import stored


@pytest.mark.parametrize(
    ("dtype", "plus", "values", "scales"),
    [
        (torch.bfloat16, 1.0, [0.00390625, 0.0, 2.5, -0.5], [4.0, 4.0, 3.0, 0.7]),  # -1 + 2^-8 in the file
        (torch.float16, 0.0, [60.0, 1e-6, 0.0, -3.0], [5e-4, 100.0, 2.0, 1.5]),
    ],
)
def test_a_value_that_a_file_cant_hold_divided_stays_and_no_channel_is_lost(
    dtype: torch.dtype, plus: float, values: list[float], scales: list[float]
) -> None:
    norm = (torch.tensor(values) - plus).to(dtype).float() + plus
    weight = Weight("0.norm", ("norm.weight",), ((4,),), plus=plus)
    found, exact = stored(norm, torch.tensor(scales), dtype, weight)
    assert found.dtype == dtype
    assert bool(exact.isfinite().all())
    torch.testing.assert_close((found.float() + plus) * exact, norm, rtol=1e-6, atol=0.0)
    assert float(exact[2:].div(torch.tensor(scales)[2:]).sub(1).abs().max()) < 0.01, "others are divided"
