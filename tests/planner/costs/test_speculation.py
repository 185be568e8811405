"""Speculation in the planner: steps cheaper per token by acceptance, as a worker would choose, from telemetry."""

from __future__ import annotations

import pytest

from baton.planner.costs.speculation import acceptance_of, parse_acceptance, with_acceptance
from baton.planner.costs.worker import worker_costs
from baton.protos.errors import ConfigError

COSTS = worker_costs("roofline:llama-3-8b@h100")


def test_a_step_counts_over_the_tokens_that_it_is_expected_to_give() -> None:
    found = with_acceptance(COSTS, (0.8, 0.5))
    one = found.step_seconds(0, 0.0, 1, 1000.0)
    whole = COSTS._body(3 * COSTS.written) + COSTS.sequence + 1000.0 * COSTS.context
    assert one == pytest.approx(whole / (1 + 0.8 + 0.4))
    assert found.context_seconds(1) == pytest.approx(COSTS.context / 2.2)
    assert found.step_seconds(512, 9.0, 0, 0.0) == COSTS.step_seconds(512, 9.0, 0, 0.0)
    assert found.step_seconds(512, 9.0, 4, 10.0) == COSTS.step_seconds(512, 9.0, 4, 10.0)
    assert "drafts that stand by 80%, 50%" in found.about


def test_where_rows_cost_more_than_drafts_bring_none_are_made() -> None:
    found = with_acceptance(COSTS, (0.3,))
    crowd = 4096
    assert found.step_seconds(0, 0.0, 1, 0.0) < COSTS.step_seconds(0, 0.0, 1, 0.0)
    assert found.step_seconds(0, 0.0, crowd, 0.0) == COSTS.step_seconds(0, 0.0, crowd, 0.0)
    assert found.context_seconds(crowd) == COSTS.context
    assert with_acceptance(COSTS, (0.0, 0.0)) is COSTS


def test_a_running_clusters_acceptance_is_the_mean_of_its_workers() -> None:
    cluster = {
        "workers": [
            {"speculation": {"acceptance": [0.8, 0.5, None]}},
            {"speculation": {"acceptance": [0.6, None, None]}},
            {"speculation": None},
        ]
    }
    assert acceptance_of(cluster) == pytest.approx((0.7, 0.5))
    deeper = {"workers": [*cluster["workers"], {"speculation": {"acceptance": [0.7, None, None, 0.9]}}]}
    assert acceptance_of(deeper) == pytest.approx((0.7, 0.5)), "a position that nobody judged ends what is known"
    longer = {"workers": [*cluster["workers"], {"speculation": {"acceptance": [0.7, 0.5, 0.4, 0.2]}}]}
    assert acceptance_of(longer) == pytest.approx((0.7, 0.5, 0.4, 0.2))
    with pytest.raises(ConfigError, match="no worker of that cluster has judged a draft"):
        acceptance_of({"workers": [{"speculation": None}]})


@pytest.mark.parametrize("text", ["0.5,1.2", "many", "-1", ",".join(["0.5"] * 17)])
def test_odd_chances_are_refused_by_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--acceptance") as refused:
        parse_acceptance(text)
    assert refused.value.param == "acceptance"
    assert parse_acceptance("0.9, 0.5") == (0.9, 0.5)
    assert parse_acceptance("") == ()
