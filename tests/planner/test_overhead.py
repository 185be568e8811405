"""Tests what processes and messages take: a profile says it, a simulated request waits for it where a real one
does.
"""

from pathlib import Path

import msgspec
import pytest

from baton.cost.profiles import Overhead, load_profile
from baton.planner.costs.paced_file import to_toml
from baton.planner.costs.worker import WorkerCosts, worker_costs
from baton.planner.score import tpot, ttft
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim, SimSettings
from baton.planner.traces.trace import Trace, TraceRequest
from baton.protos.errors import ConfigError
from bench.sim_vs_paced import profile_text

ALONE = Trace("one", (TraceRequest(0.0, 200, 40),))


@pytest.fixture
def costs(tmp_path: Path) -> WorkerCosts:
    """Steps of 40 ms and more, handed over in 2 ms."""
    file = tmp_path / "p.toml"
    file.write_text(profile_text(1.0))
    return worker_costs(str(file))


def simulated(costs: WorkerCosts, trace: Trace, stepwise: bool = True) -> ClusterSim:
    settings = SimSettings(1, 1, max_batch=16, local_max_tokens=64, stepwise=stepwise)
    sim = ClusterSim(ClusterScenario(settings, costs, costs, trace))
    sim.run()
    return sim


def having(costs: WorkerCosts, **overhead: float) -> WorkerCosts:
    return msgspec.structs.replace(costs, overhead=Overhead(**overhead))


@pytest.mark.parametrize("stepwise", [True, False])
def test_a_request_alone_takes_longer_by_exactly_that(costs: WorkerCosts, stepwise: bool) -> None:
    (plain,) = simulated(costs, ALONE, stepwise).flights
    (later,) = simulated(having(costs, request=0.004, handoff=0.003, step=0.001), ALONE, stepwise).flights
    assert ttft(later) - ttft(plain) == pytest.approx(0.007)
    assert tpot(later) - tpot(plain) == pytest.approx(0.001)
    assert later.arrival == plain.arrival == 0.0


def test_a_handoff_that_misses_a_step_waits_for_the_whole_next_one(costs: WorkerCosts) -> None:
    """The prompt is read while its decode worker writes: a few milliseconds cost up to a step of 40."""
    requests = [TraceRequest(0.0, 200, 400), *(TraceRequest(1.0 + 0.9 * i, 230 + 3 * i, 2) for i in range(20))]
    trace = Trace("beside a writer", tuple(requests))
    plain, later = simulated(costs, trace), simulated(having(costs, handoff=0.003), trace)
    waits = [ttft(b) - ttft(a) for a, b in zip(plain.flights[1:], later.flights[1:], strict=True)]
    assert any(w > 0.03 for w in waits)
    assert any(abs(w) < 0.003 for w in waits)


def test_a_prompt_that_is_read_where_it_is_written_is_not_handed_over(costs: WorkerCosts) -> None:
    short = Trace("short", (TraceRequest(0.0, 40, 10),))
    (plain,), (later,) = (simulated(c, short).flights for c in (costs, having(costs, handoff=0.5)))
    assert ttft(later) == ttft(plain)


def test_a_profile_says_it_and_a_file_keeps_it(tmp_path: Path, costs: WorkerCosts) -> None:
    file = tmp_path / "own.toml"
    file.write_text(to_toml(having(costs, request=0.004, handoff=0.003), 32000, 4096, 512))
    assert load_profile(str(file)).overhead == worker_costs(str(file)).overhead == Overhead(0.004, 0.003, 0.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [("request = -1.0", "request must be 0 or more"), ("reply = 0.1", "reply"), ("step = 'a'", "step")],
)
def test_a_wrong_overhead_is_an_error_that_names_it(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(f"{profile_text(1.0)}\n[overhead]\n{line}\n")
    with pytest.raises(ConfigError, match=said):
        load_profile(str(file))
