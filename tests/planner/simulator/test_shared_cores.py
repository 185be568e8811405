"""Workers on the same cores: steps slow each other down while they overlap, and alone they take their time."""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.planner.costs.worker import WorkerCosts, from_curve
from baton.planner.score import tpot, ttft
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim, SimSettings
from baton.planner.simulator.shared_cores import CoreSharing, SharedCores
from baton.planner.traces.trace import Trace, TraceRequest
from baton.protos.errors import ConfigError
from baton.protos.measurements import StepCurve, TransferCurve

COSTS: WorkerCosts = from_curve(
    "a worker", StepCurve(0.01, 1e-3, 0.0, 0.0, 0.0), 65536, 64, TransferCurve(0.0, 0.0)
)
ONE = TraceRequest(0.0, 192, 30)


class Clock:
    """Calls back in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, act: Callable[[], None]) -> None:
        heappush(self._events, (when, len(self._events) + id(act), act))

    def run(self) -> None:
        while self._events:
            self.now, _, act = heappop(self._events)
            act()


def reads(writing: list[tuple[float, bool]], seconds: float = 1.0) -> float:
    """Returns when a step ends that takes ``seconds`` alone and begins at 0, while a decode worker comes and
    goes.
    """
    clock, ended = Clock(), []
    cores = SharedCores(CoreSharing(2.0, 3.0), clock.at)
    for when, busy in writing:
        clock.at(when, partial(cores.writes, "d", when, busy))
    clock.at(0.0, lambda: cores.read("p", 0.0, seconds, lambda: ended.append(clock.now)))
    clock.run()
    (end,) = ended
    return end


def test_a_prefill_step_alone_takes_its_time_and_twice_that_beside_a_writer() -> None:
    assert reads([]) == 1.0
    assert reads([(-1.0, True)]) == 2.0


def test_a_writer_that_comes_and_goes_slows_only_what_it_overlaps() -> None:
    assert reads([(0.5, True)]) == pytest.approx(1.5)
    assert reads([(0.2, True), (0.6, False)]) == pytest.approx(1.2)
    assert reads([(1.5, True)]) == 1.0


@given(st.lists(st.floats(0.01, 2.0), max_size=8), st.floats(0.1, 3.0))
def test_what_is_left_is_what_was_not_done(gaps: list[float], seconds: float) -> None:
    times, at = [], 0.0
    for gap in gaps:
        at += gap
        times.append(at)
    end = reads([(when, i % 2 == 0) for i, when in enumerate(times)], seconds)
    slow = sum(min(b, end) - min(a, end) for a, b in zip(times[::2], [*times[1::2], end], strict=False))
    assert end - slow / 2 == pytest.approx(seconds)


def test_a_decode_step_is_slowed_until_the_prompt_beside_it_is_read() -> None:
    clock = Clock()
    cores = SharedCores(CoreSharing(2.0, 3.0), clock.at)
    assert cores.stretched("d", 0.0, 0.1) == 0.1
    cores.read("p", 0.0, 1.0, lambda: None)
    assert cores.stretched("d", 0.0, 0.1) == pytest.approx(0.3)
    assert cores.stretched("d", 0.0, 0.5) == pytest.approx(1.0 + 0.5 - 1.0 / 3)
    assert cores.stretched("d", 1.0, 0.5) == 0.5


def test_a_step_of_a_worker_that_died_never_ends() -> None:
    clock, ended = Clock(), []
    cores = SharedCores(CoreSharing(2.0, 2.0), clock.at)
    cores.read("p", 0.0, 1.0, lambda: ended.append(1))
    clock.at(0.5, lambda: cores.stop("p", 0.5))
    clock.run()
    assert ended == []


def test_one_request_at_a_time_never_meets_another_and_two_do() -> None:
    apart = Trace("apart", (ONE, TraceRequest(10.0, 192, 30)))
    beside = Trace("beside", (ONE, TraceRequest(0.25, 192, 30)))
    alone, shared, crowded = (
        simulated(apart, None),
        simulated(apart, CoreSharing(2.0, 2.0)),
        simulated(beside, CoreSharing(2.0, 2.0)),
    )
    assert [ttft(f) for f in shared.flights] == pytest.approx([ttft(f) for f in alone.flights])
    assert [tpot(f) for f in shared.flights] == pytest.approx([tpot(f) for f in alone.flights])
    writer, reader = crowded.flights
    assert ttft(reader) > 1.5 * ttft(shared.flights[1])
    assert tpot(writer) > 1.3 * tpot(shared.flights[0])


@pytest.mark.parametrize("prefill", [0, 1, 2])
def test_all_requests_end_where_workers_share_cores_and_sharing_nothing_changes_nothing(prefill: int) -> None:
    trace = Trace("many", tuple(TraceRequest(0.05 * i, 64 + 32 * (i % 5), 1 + i % 40) for i in range(60)))
    free, none, shared = (
        simulated(trace, s, prefill, 2) for s in (CoreSharing(1.0, 1.0), None, CoreSharing(2.0, 1.7))
    )
    for sim in (free, none, shared):
        assert all(f.written == f.outputs for f in sim.flights)
    assert [f.last_token for f in free.flights] == pytest.approx([f.last_token for f in none.flights])
    assert sum(f.last_token for f in shared.flights) > sum(f.last_token for f in none.flights)


def test_shared_cores_without_stepwise_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="stepwise"):
        ClusterSim(
            ClusterScenario(SimSettings(1, 1), COSTS, COSTS, Trace("one", (ONE,)), sharing=CoreSharing(2.0, 2.0))
        )


def simulated(trace: Trace, sharing: CoreSharing | None, prefill: int = 1, decode: int = 1) -> ClusterSim:
    sim = ClusterSim(
        ClusterScenario(SimSettings(prefill, decode, stepwise=True), COSTS, COSTS, trace, sharing=sharing)
    )
    sim.run()
    return sim
