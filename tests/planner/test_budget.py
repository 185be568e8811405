"""Tests what a budget buys, of which width, and what is said where it buys nothing."""

import math
from pathlib import Path

import pytest

from baton.planner.budget import Budget, of_widths, spend, whole_parts
from baton.planner.costs.worker import WorkerCosts, worker_costs
from baton.planner.plan import Plan, plan
from baton.planner.score import Slo
from baton.planner.simulator.cluster import ClusterScenario, SimSettings
from baton.planner.sweep import sweep
from baton.planner.traces.trace import read_trace
from baton.protos.errors import ConfigError

TRACE = read_trace(str(Path(__file__).parents[1] / "data" / "mooncake_conversation_400.jsonl")).between(0, 15)
PROFILE = "roofline:llama-3-70b@h100"
EIGHT_B = "roofline:llama-3-8b@h100"
FOUR = worker_costs(f"{PROFILE}x4")


def planned(costs: WorkerCosts, workers: int) -> Plan:
    slo = Slo(10.0, 0.1)
    scenario = ClusterScenario(SimSettings(0, workers), costs, costs, TRACE)
    found, flights = sweep(workers, scenario, slo, window_s=5.0)
    return plan(found, flights, scenario, slo, 0.5, {"all": 1 << 40})


def test_a_multiple_of_a_price_buys_as_many_workers() -> None:
    assert [whole_parts(2.99 * 7, 2.99), whole_parts(7.47, 2.49), whole_parts(7.4, 2.49)] == [7, 3, 2]


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_a_budget_that_is_no_amount_is_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigError, match=r"dollars is .*; it must be a number above 0") as refused:
        Budget(dollars=value, price=1.0)
    assert refused.value.param == "dollars"


def test_each_kind_of_budget_buys_whole_workers() -> None:
    assert Budget(workers=5).buys(FOUR) == 5
    assert Budget(accelerators=15).buys(FOUR) == 3
    assert Budget(dollars=25.0, price=2.0).buys(FOUR) == 3
    assert Budget(watts=3.5 * FOUR.watts).buys(FOUR) == 3


@pytest.mark.parametrize("given", [{}, {"workers": 2, "watts": 100.0}, {"dollars": 10.0}])
def test_a_budget_that_says_nothing_or_two_things_or_lacks_its_price_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Budget(**given)  # type: ignore[arg-type]


def test_watts_need_a_profile_that_has_them() -> None:
    with pytest.raises(ConfigError, match="no watts"):
        Budget(watts=1000.0).buys(worker_costs("h100-llama3-8b"))


def test_widths_replace_the_profiles_own_and_are_of_roofline_profiles_alone() -> None:
    assert of_widths(f"{PROFILE}x8", [2, 4]) == [f"{PROFILE}x2", f"{PROFILE}x4"]
    assert of_widths(PROFILE, [2]) == [f"{PROFILE}x2"]
    assert of_widths("roofline:llama-3-8b@mi300x", [2]) == ["roofline:llama-3-8b@mi300xx2"]
    assert of_widths(f"{PROFILE},quantization=int8", [1]) == [f"{PROFILE}x1,quantization=int8"]
    assert of_widths("h100-llama3-8b", []) == ["h100-llama3-8b"]
    for profile, widths in (("h100-llama3-8b", [2]), (PROFILE, [0])):
        with pytest.raises(ConfigError, match="roofline"):
            of_widths(profile, widths)


def test_the_width_with_the_most_good_requests_is_planned_and_the_others_say_what_they_came_to() -> None:
    found, tried = spend(Budget(accelerators=16), of_widths(PROFILE, [1, 2, 4, 16]), planned, hypothetical=True)
    assert [t.workers for t in tried] == [0, 8, 4, 1]
    assert "doesn't fit" in tried[0].reason
    assert "buys 1" in tried[3].reason
    assert found.chosen.score.attainment == max(t.attainment for t in tried)
    assert found.chosen.name in {t.ratio for t in tried}


def test_where_no_width_can_be_bought_every_reason_is_said() -> None:
    with pytest.raises(ConfigError, match=r"x1: .*doesn't fit.*x8: the budget buys 1"):
        spend(Budget(accelerators=8), of_widths(PROFILE, [1, 8]), planned, hypothetical=True)


def test_more_workers_than_can_be_swept_are_refused_before_any_is_simulated() -> None:
    def none(costs: WorkerCosts, workers: int) -> Plan:
        raise AssertionError("it simulates")

    with pytest.raises(ConfigError, match="buys 1000000000, and ratios of at most 4096 workers are swept"):
        spend(Budget(workers=10**9), [EIGHT_B], none, hypothetical=True)


def test_a_width_that_the_engine_cannot_run_is_refused_by_name_and_never_the_answer() -> None:
    found, tried = spend(Budget(accelerators=4), of_widths(EIGHT_B, [1, 2]), planned)
    assert found.chosen.name == tried[0].ratio
    assert "a worker of 2 accelerators can't run: the engine computes on 1" in tried[1].reason
    with pytest.raises(ConfigError, match=r"8 accelerators can't run.*--hypothetical"):
        spend(Budget(workers=4), [f"{EIGHT_B}x8"], planned)
