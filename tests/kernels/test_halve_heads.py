"""Rows before they are rotated: the reference's numbers natively, and no bit that depends on the rows beside."""

from __future__ import annotations

import torch

from baton.kernels.halve_heads import native, reference
from tests.kernels.conftest import needs_native


@needs_native
def test_heads_are_halved_as_by_the_reference() -> None:
    x = torch.randn(7, 5 * 12 + 9)
    for paired in (2, 6, 12):
        assert torch.equal(native.halve_heads(x, 5, 12, paired), reference.halve_heads(x, 5, 12, paired))
    assert torch.equal(native.halve_heads(x.bfloat16(), 5, 12, 6), reference.halve_heads(x.bfloat16(), 5, 12, 6))


@needs_native
def test_queries_are_scaled_by_position_in_one_row_as_in_many() -> None:
    rows = torch.randn(40, 30)
    many, wanted = rows.clone(), rows.double()
    native.temper_queries(many, 20, 3, 0.3, 9.0, 1)
    reference.temper_queries(wanted, 20, 3, 0.3, 9.0, 1)
    torch.testing.assert_close(many, wanted.float())
    assert torch.equal(many[:5, :20], rows[:5, :20]), "positions below the floor keep their queries"
    assert torch.equal(many[:, 20:], rows[:, 20:])
    for at in range(40):
        one = rows[at : at + 1].clone()
        native.temper_queries(one, 20, 3 + at, 0.3, 9.0, 1)
        assert torch.equal(one, many[at : at + 1])
