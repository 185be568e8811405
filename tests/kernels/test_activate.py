"""Activations of gateless MLPs: float64's numbers, and no bit that depends on the rows beside."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.activate.native import KINDS, activate
from baton.kernels.activate.reference import ACTIVATIONS
from tests.kernels.conftest import needs_native


@needs_native
@pytest.mark.parametrize("name", sorted(KINDS))
def test_an_activation_is_float64s_and_a_rows_bits_are_its_own(name: str) -> None:
    x = torch.randn(7, 88) * 4
    x[0, :3] = torch.tensor([-90.0, 90.0, 0.0])
    found = activate(x, name)
    torch.testing.assert_close(found, ACTIVATIONS[name](x.double()).float(), atol=2e-6, rtol=3e-6)
    for row in range(len(x)):
        assert torch.equal(activate(x[row : row + 1], name), found[row : row + 1])


def test_what_native_code_lacks_is_torchs() -> None:
    x = torch.randn(3, 5)
    assert torch.equal(activate(x, "gelu"), ACTIVATIONS["gelu"](x))
    assert torch.equal(activate(x.bfloat16(), "silu"), ACTIVATIONS["silu"](x.bfloat16()))
