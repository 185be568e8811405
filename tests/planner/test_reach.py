"""The least that works and the most load it takes, each found by simulation."""

from pathlib import Path

import pytest

from baton.planner.costs.worker import worker_costs
from baton.planner.reach import Headroom, headroom, highest_load, least_sufficient, least_workers, on_idle_workers
from baton.planner.score import Slo
from baton.planner.simulator.cluster import ClusterScenario, SimSettings
from baton.planner.sweep import RatioOutcome, at_ratio, simulate
from baton.planner.traces.trace import Trace, TraceRequest, read_trace

AZURE = read_trace(str(Path(__file__).parents[1] / "data" / "azure_2023_conversation_300.csv"))
COSTS = worker_costs("roofline:llama-3-8b@h100")
ONE = simulate(ClusterScenario(SimSettings(0, 1), COSTS, COSTS, AZURE.between(0, 20)), Slo(1, 1))


def scenario(trace: Trace, workers: int = 1) -> ClusterScenario:
    return ClusterScenario(SimSettings(0, workers), COSTS, COSTS, trace)


def met_up_to(limit: float, asked: list[float]):
    """A cluster that takes ``limit`` times the load."""

    def at(load: float) -> RatioOutcome:
        from msgspec.structs import replace

        asked.append(load)
        return replace(ONE, score=replace(ONE.score, attainment=1.0 if load <= limit else 0.5))

    return at


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0, 9.7, 23.0])
def test_the_highest_load_is_found_to_a_few_percent_in_few_runs(limit: float) -> None:
    asked: list[float] = []
    found = highest_load(met_up_to(limit, asked), 0.9, sustained=1000.0)
    assert found.over is not None
    assert found.load <= limit < found.over <= 1.05 * found.load
    assert (found.attainment, found.over_attainment) == (1.0, 0.5)
    assert len(asked) <= 12


def test_a_load_that_ends_before_a_backlog_shows_is_not_said_to_be_met() -> None:
    found = highest_load(met_up_to(9.7, []), 0.9, sustained=3.0)
    assert found.load == 3.0
    assert found.over is not None
    assert 9.7 < found.over <= 1.05 * 9.7
    assert highest_load(met_up_to(1e9, []), 0.9, sustained=3.0) == Headroom(3.0, 1.0, None, 0.0, "")


def test_a_load_that_is_said_to_be_met_is_met_when_it_is_simulated_and_the_next_is_not() -> None:
    slo, own = Slo(0.3, 0.02), scenario(AZURE)
    found = headroom(own, slo, 0.95)
    assert found.over is not None
    for load, said, met in ((found.load, found.attainment, True), (found.over, found.over_attainment, False)):
        score = simulate(scenario(AZURE.faster(load)), slo).score
        assert score.attainment == said
        assert (score.attainment >= 0.95) is met
    assert headroom(own, slo, 0.95) == found, "same seed, same answer"


def test_the_fewest_workers_do_and_one_fewer_does_not() -> None:
    busy, slo = scenario(AZURE.between(0, 20).faster(100.0)), Slo(0.1, 0.05)
    found = least_workers(busy, slo, 0.9)
    assert found is not None
    count = found.prefill + found.decode
    assert count > 1
    assert found.score.attainment >= 0.9
    fewer = [simulate(at_ratio(busy, p, count - 1 - p), slo).score.attainment for p in range(count - 1)]
    assert max(fewer) < 0.9
    assert least_workers(busy, slo, 0.9, 1, count - 1) is None
    assert f"the fewest workers that do are {count} ({found.name}" in least_sufficient(busy, slo, 0.9, 1)


def test_what_an_idle_worker_cannot_do_no_number_can_and_the_least_slo_is_named() -> None:
    idle = on_idle_workers(scenario(AZURE), Slo(1e-3, 0.1), 0.9)
    assert idle.attainment == 0.0
    assert idle.slo is not None
    assert on_idle_workers(scenario(AZURE), idle.slo, 0.9).attainment >= 0.9
    said = least_sufficient(scenario(AZURE), Slo(1e-3, 0.1), 0.9, 3)
    assert f"TTFT {idle.slo.ttft_s:.3g} s and TPOT 100 ms" in said
    assert "more workers don't help" in said


def test_requests_that_no_worker_holds_are_said_to_want_memory() -> None:
    huge = Trace("t", tuple(TraceRequest(float(i), COSTS.kv_tokens, 10) for i in range(4)))
    assert "100.0% of the requests fit no worker's KV pages" in least_sufficient(scenario(huge), Slo(9, 9), 0.9, 1)
