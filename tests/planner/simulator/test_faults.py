"""Deaths and unlike workers in the simulated cluster: nothing is lost, and what is lost of a way is found again."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from baton.console.main import app
from baton.planner.costs.worker import WorkerCosts, worker_costs
from baton.planner.score import tpot, ttft
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim, SimSettings
from baton.planner.simulator.faults import Failure, SimPool, parse_failure, parse_pool
from baton.planner.traces.trace import Trace, TraceRequest, read_trace
from baton.protos.errors import ConfigError
from tests.thorough import first_now

DATA = Path(__file__).parents[2] / "data"
LARGE, SMALL = worker_costs("roofline:llama-3-70b@a800x8"), worker_costs("roofline:llama-3-8b@h100")
NEVER = float("inf")
PROFILE = "roofline:llama-3-70b@a800x8"
WORKERS = ["prefill-0", "prefill-1", "decode-0", "decode-1"]


def mooncake(seconds: float) -> Trace:
    return read_trace(str(DATA / "mooncake_conversation_400.jsonl")).between(0, seconds)


def run(
    trace: Trace, prefill: int, decode: int, *failures: Failure, costs: WorkerCosts = LARGE, **more
) -> ClusterSim:
    pools = more.pop("pools", ())
    sim = ClusterSim(ClusterScenario(SimSettings(prefill, decode, **more), costs, costs, trace, pools, failures))
    sim.run()
    return sim


def check(sim: ClusterSim) -> None:
    """Every request ended or was refused, its times in order, and every page is given back."""
    assert not sim.active
    for flight in sim.flights:
        if not flight.refused:
            assert flight.arrival <= flight.placed <= flight.first_token <= flight.last_token
            assert flight.written == flight.outputs
    for place in (*sim.prefills.values(), *sim.decodes.values()):
        place.node.pool.check()
        assert place.node.pool.snapshot_counts().leases == 0
        assert (place.sequences, place.pending_prompts, place.pending_tokens) == (0, 0, 0)


def times(sim: ClusterSim) -> list[tuple[float, float, float]]:
    return [(f.placed, f.first_token, f.last_token) for f in sim.flights]


@pytest.mark.parametrize(
    ("worker", "stepwise"),
    first_now([("prefill-0", False), ("decode-0", True), ("prefill-0", True), ("decode-0", False)], 2),
)
def test_a_worker_that_dies_loses_no_request(worker: str, stepwise: bool) -> None:
    trace = mooncake(45)
    sim, calm = (run(trace, 2, 2, *failures, stepwise=stepwise) for failures in ((Failure(worker, 20, 40),), ()))
    check(sim)
    assert not any(f.refused for f in sim.flights)
    assert sim.faults.deaths == 1
    assert (sim.faults.moved if worker == "decode-0" else sim.faults.read_again) > 0
    assert sum(f.moves for f in sim.flights) == sim.faults.moved
    before = [(a, b) for a, b in zip(times(sim), times(calm), strict=True) if b[2] < 20]
    assert before, "some end before"
    assert all(a == b for a, b in before), "what was over isn't touched"


def test_the_same_failures_give_the_same_answer_whatever_their_order() -> None:
    failures = Failure("decode-1", 10, 30), Failure("prefill-1", 15, 20), Failure("decode-0", 35, 50)
    first, again, turned = (run(mooncake(60), 2, 2, *f) for f in (failures, failures, failures[::-1]))
    check(first)
    assert times(first) == times(again) == times(turned)


def test_an_answer_goes_on_where_it_was_and_its_client_sees_a_gap() -> None:
    trace = Trace("one", (TraceRequest(0.0, 1024, 400),))
    calm = run(trace, 1, 2).flights[0]
    half = (calm.first_token + calm.last_token) / 2
    sim = run(trace, 1, 2, Failure("decode-0", half, NEVER), Failure("decode-1", half + 0.001, half + 0.002))
    moved = sim.flights[0]
    check(sim)
    assert (moved.moves, moved.first_token) == (1 if moved.moves == 1 else 2, calm.first_token)
    longer = moved.last_token - calm.last_token
    read_again = ttft(calm)
    assert 0 < longer < 5 * read_again, "the tokens that were written are read, not written again"
    assert tpot(moved) > tpot(calm)


def test_a_prompt_whose_reader_died_is_read_by_another_for_the_same_decode_worker() -> None:
    trace = Trace("one", (TraceRequest(0.0, 60_000, 10),))
    calm = run(trace, 2, 1).flights[0]
    reader = f"prefill-{int(calm.prefill[1:])}"
    sim = run(trace, 2, 1, Failure(reader, calm.first_token / 2, NEVER))
    flight = sim.flights[0]
    check(sim)
    assert flight.prefill != calm.prefill
    assert sim.faults.read_again == 1
    assert ttft(flight) == pytest.approx(1.5 * ttft(calm), rel=0.15)


def test_without_any_reader_the_decode_worker_reads_or_everybody_waits_for_one() -> None:
    sim = run(mooncake(30), 1, 2, Failure("prefill-0", 5, NEVER))
    check(sim)
    assert not any(f.refused for f in sim.flights)
    assert sim.placements["local"] > 0


def test_when_nobody_comes_back_the_rest_is_refused_not_lost() -> None:
    sim = run(mooncake(30), 1, 1, Failure("decode-0", 10, NEVER))
    check(sim)
    refused = [f for f in sim.flights if f.refused]
    assert refused
    assert all(f.refused for f in sim.flights if f.arrival > 10)


@settings(max_examples=40, deadline=None)
@given(
    failures=st.lists(st.tuples(st.sampled_from(WORKERS), st.floats(0, 8), st.floats(0.01, 5)), max_size=6),
    shapes=st.lists(st.tuples(st.floats(0, 6), st.integers(1, 6000), st.integers(1, 200)), min_size=1, max_size=20),
    pages=st.integers(16, 60),
    stepwise=st.booleans(),
)  # fmt: skip
def test_whatever_dies_when_each_request_ends_or_is_refused_once(failures, shapes, pages, stepwise) -> None:
    costs = msgspec.structs.replace(SMALL, kv_tokens=pages * 512)
    trace = Trace("made", tuple(sorted((TraceRequest(*s) for s in shapes), key=lambda r: r.arrival)))
    deaths = (Failure(name, at, at + lasts) for name, at, lasts in failures)
    sim = run(trace, 2, 2, *deaths, costs=costs, stepwise=stepwise)
    check(sim)
    assert all(f.refused == (f.prompt + f.outputs > pages * 512) for f in sim.flights)


# ---- pools -------------------------------------------------------------------------------------------------


def test_a_pool_of_faster_workers_is_given_more() -> None:
    quick = msgspec.structs.replace(LARGE, token=LARGE.token / 4, pair=LARGE.pair / 4, weights=LARGE.weights / 4)
    sim = run(mooncake(60), 1, 2, pools=(SimPool("quick", "prefill", 1, quick),))
    check(sim)
    read = {name: place.node.computed_tokens for name, place in sim.prefills.items()}
    assert set(read) == {"p000", "quick-0"}
    assert read["quick-0"] > 1.5 * read["p000"]


def test_long_prompts_go_where_they_fit() -> None:
    small = msgspec.structs.replace(LARGE, kv_tokens=8192)
    sim = run(
        mooncake(60),
        2,
        1,
        costs=small,
        pools=(SimPool("big", "prefill", 1, LARGE), SimPool("vast", "decode", 1, LARGE)),
    )
    check(sim)
    assert not any(f.refused for f in sim.flights)
    long = [f for f in sim.flights if f.prompt > 8192]
    assert long
    assert {f.decode for f in long} == {"vast-0"}


def test_workers_of_pools_fail_by_their_names() -> None:
    sim = run(mooncake(30), 1, 1, Failure("more-0", 5, 15), pools=(SimPool("more", "decode", 1, LARGE),))
    check(sim)
    assert sim.faults.deaths == 1


def test_what_cannot_be_is_said() -> None:
    assert parse_failure("decode-1@30:45.5") == Failure("decode-1", 30.0, 45.5)
    assert parse_failure("long-0@3:never").until == NEVER
    pool = parse_pool("long:prefill:2=roofline:llama-3-70b@a800x8", 2048)
    assert (pool.name, pool.role, pool.count, pool.costs) == ("long", "prefill", 2, LARGE)
    for wrong in ("decode-1", "decode-1@45:30", "decode@3:4"):
        with pytest.raises(ConfigError, match="--fail"):
            parse_failure(wrong)
    for wrong in ("long:prefill", "prefill:prefill:2=roofline:llama-3-70b@a800x8", "a:reader:1=x"):
        with pytest.raises(ConfigError, match="--pool"):
            parse_pool(wrong, 2048)
    with pytest.raises(ConfigError, match="there is no worker 'decode-7'"):
        run(mooncake(10), 1, 1, Failure("decode-7", 1, 2))
    with pytest.raises(ConfigError, match="different models"):
        run(mooncake(10), 1, 1, pools=(SimPool("other", "decode", 1, SMALL),))


def test_the_command_takes_both_and_tells_what_was_moved() -> None:
    flags = [
        "sim",
        "--trace",
        str(DATA / "mooncake_conversation_400.jsonl"),
        "--profile",
        PROFILE,
        "--seconds",
        "40",
    ]
    pool = ["--pool", f"fast:prefill:1={PROFILE}"]
    deaths = ["--fail", "decode-1@10:20", "--fail", "fast-0@5:30"]
    done = CliRunner().invoke(app, [*flags, "--prefill", "1", "--decode", "2", *pool, *deaths, "--json", "-"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["result"]
    assert (found["prefill"], found["deaths"]) == (2, 2)
    assert found["moved"] > 0
    wrong = CliRunner().invoke(app, [*flags, "--fail", "decode-7@1:2"])
    assert wrong.exit_code == 1
    assert "there is no worker" in wrong.output


def test_adapters_cost_every_pool_their_factor(tmp_path: Path) -> None:
    lines = (DATA / "mooncake_conversation_400.jsonl").read_text().splitlines()[:20]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(json.loads(line) | {"adapter": 1}) + "\n" for line in lines))
    flags = ["sim", "--trace", str(trace), "--profile", PROFILE, "--prefill", "1", "--decode", "1", "--json", "-"]
    flags += ["--pool", f"only:prefill:1={PROFILE}", "--fail", "prefill-0@0:9999"]  # the pool reads all
    dear, cheap = (
        json.loads(CliRunner().invoke(app, [*flags, "--adapter-cost", cost]).stdout)["result"]["score"]["ttft"]
        for cost in ("3", "1")
    )
    assert dear["median"] > 2 * cheap["median"]


def test_a_worker_whose_failures_overlap_is_dead_until_the_last_of_them_ends() -> None:
    """The end of the first one brought it back."""
    trace = mooncake(60)
    overlapping = run(trace, 2, 2, Failure("decode-0", 10, 20), Failure("decode-0", 15, 50))
    once = run(trace, 2, 2, Failure("decode-0", 10, 50))
    check(overlapping)
    assert (overlapping.faults.deaths, times(overlapping)) == (1, times(once))
