"""Tests tolerances: how they are written, what they judge, and what is refused."""

from __future__ import annotations

import pytest

from baton.evaluate.figures import Figure, judged, passes, tolerances
from baton.protos.errors import ConfigError


def figure(value: float, low: float, high: float) -> Figure:
    return Figure("added loss", value, "share", low, high, 10, "loss")


def test_tolerances_are_shares_or_percents_and_a_bare_one_is_of_the_loss() -> None:
    assert tolerances(["1%", "kl=0.02"]) == {"loss": 0.01, "kl": 0.02}


@pytest.mark.parametrize("text", ["speed=1", "loss=much", "-1%", "nan", ""])
def test_what_is_no_tolerance_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match="--fail-above"):
        tolerances([text])


def test_a_figure_above_its_tolerance_fails_the_whole() -> None:
    assert passes(judged([figure(0.01, 0.005, 0.02)], {"loss": 0.01}))
    assert not passes(judged([figure(0.011, 0.005, 0.02)], {"loss": 0.01}))


def test_a_verdict_is_sure_where_the_whole_interval_is_on_one_side() -> None:
    near, far = judged([figure(0.01, 0.005, 0.02), figure(0.01, 0.009, 0.011)], {"loss": 0.015})
    assert not near.is_sure
    assert far.is_sure


def test_a_tolerance_of_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="kl was asked for, and none of it fits"):
        judged([figure(0.0, 0.0, 0.0)], {"kl": 0.1})
