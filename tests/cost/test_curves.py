"""Tests the evaluation of cost curves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cost.curves import decode_seconds, exposed_seconds, prefill_seconds, step_seconds, transfer_seconds
from baton.protos.measurements import StepCurve, StepSample, TransferCurve

CURVE = StepCurve(1.0, 0.1, 0.01, 0.001, 0.0001)
LINK = TransferCurve(0.5, 0.25)


def test_a_step_is_the_sum_of_its_terms() -> None:
    assert step_seconds(CURVE, StepSample(2, 3.0, 4, 5, 99.0)) == pytest.approx(1 + 0.2 + 0.03 + 0.004 + 0.0005)
    assert decode_seconds(CURVE, 4, 5) == pytest.approx(1.0045)


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(1, 600))
def test_a_prompt_takes_as_long_as_its_chunks_one_by_one(uncached: int, cached: int, chunk: int) -> None:
    total, start = 0.0, cached
    while start < cached + uncached:
        new = min(chunk, cached + uncached - start)
        total += step_seconds(CURVE, StepSample(new, new * (start + new / 2), 0, 0, 0.0))
        start += new
    assert prefill_seconds(CURVE, uncached, cached, chunk) == pytest.approx(total)


def test_nothing_takes_no_time() -> None:
    assert prefill_seconds(CURVE, 0) == transfer_seconds(LINK, 0) == exposed_seconds(LINK, 0, 0, 0.0) == 0.0


def test_what_computing_hides_of_a_transfer_is_not_exposed() -> None:
    assert exposed_seconds(LINK, 100, 20, hidden_s=1000.0) == transfer_seconds(LINK, 20)
    assert exposed_seconds(LINK, 100, 20, hidden_s=0.0) == pytest.approx(transfer_seconds(LINK, 100))
    assert exposed_seconds(LINK, 100, 20, hidden_s=15.0) == pytest.approx(5.0 + transfer_seconds(LINK, 20))
