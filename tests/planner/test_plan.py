"""Sweeps, plateaus, cliffs, verdicts and prices; and the command that shows them."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from baton.console.main import app
from baton.cost.profiles import load_profile
from baton.planner.costs.worker import worker_costs
from baton.planner.plan import Plan, plan
from baton.planner.score import Slo, by_class, is_good
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim, SimSettings
from baton.planner.simulator.flight import Flight
from baton.planner.sweep import Flights, Sweep, at_ratio, miss_reason, simulate, sweep
from baton.planner.traces.trace import Trace, TraceRequest, read_trace
from baton.protos.errors import ConfigError

MOONCAKE = Path(__file__).parents[1] / "data" / "mooncake_conversation_400.jsonl"
CLASSES = {"short": 2048, "long": 1_000_000}
COSTS = worker_costs("roofline:llama-3-70b@a800x8")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(str(MOONCAKE)).between(0, 90)


def nine(trace: Trace) -> ClusterScenario:
    return ClusterScenario(SimSettings(0, 9), COSTS, COSTS, trace)


@pytest.fixture(scope="module")
def found(trace: Trace) -> tuple[Sweep, Flights]:
    return sweep(9, nine(trace), Slo(10.0, 0.1), window_s=10.0)


@pytest.fixture(scope="module")
def made(found: tuple[Sweep, Flights], trace: Trace) -> Plan:
    """Seven of nine read; met by fewer than 90%, so 80% are asked for."""
    return answer(found, trace, 0.8)


def answer(found: tuple[Sweep, Flights], trace: Trace, want: float) -> Plan:
    return plan(*found, nine(trace), Slo(10.0, 0.1), want, CLASSES, price_per_accelerator_hour=2.0)


def test_every_ratio_is_tried_and_the_best_is_on_its_plateau(found: tuple[Sweep, Flights]) -> None:
    swept = found[0]
    assert [(r.prefill, r.decode) for r in swept.ratios] == [(p, 9 - p) for p in range(1, 9)]
    assert swept.colocated.prefill == 0
    low, high = swept.plateau
    assert low <= swept.best.prefill <= high
    assert swept.interval[0] <= swept.interval[1]
    assert swept.goodput_interval[0] <= swept.best.score.goodput * 1.3


def test_ratios_that_are_simulated_side_by_side_give_the_same_sweep(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.planner.sweep.WORTH_PROCESSES", 0)
    few = trace.between(0, 20)
    alone, beside = (sweep(3, nine(few), Slo(10.0, 0.1), 10.0, processes=count) for count in (1, 2))
    assert alone[0] == beside[0]
    for ratio, flights in alone[1].items():
        assert [f.last_token for f in flights] == [f.last_token for f in beside[1][ratio]]


def test_too_few_prefill_workers_are_a_cliff_that_is_explained(found: tuple[Sweep, Flights]) -> None:
    swept = found[0]
    cliff = next(c for c in swept.cliffs if c.side == "few prefill")
    assert cliff.prefill == swept.plateau[0] - 1
    assert cliff.lost > 0.02
    assert "first token late" in cliff.reason


def test_a_plan_says_which_ratio_and_what_it_costs(made: Plan, found: tuple[Sweep, Flights], trace: Trace) -> None:
    assert made.accelerators == 72
    assert {v.name for v in made.classes} <= set(CLASSES)
    assert sum(v.requests for v in made.classes) == len(trace.requests)
    assert made.price is not None
    assert made.price.per_hour == 144.0
    chosen = made.chosen
    spent = 144.0 * max(f.last_token for f in found[1][chosen.prefill, chosen.decode]) / 3600
    read, written = (sum(getattr(r, name) for r in trace.requests) for name in ("input_length", "output_length"))
    assert made.price.per_million == pytest.approx(spent / (read + written) * 1e6)
    share = chosen.prefill / (chosen.prefill + chosen.decode)  # input tokens pay for prefill workers alone
    assert made.price.per_million_input == pytest.approx(share * spent / read * 1e6)
    assert made.price.per_million_output == pytest.approx((1 - share) * spent / written * 1e6)


def test_how_much_more_load_it_takes_was_simulated(made: Plan, trace: Trace) -> None:
    """Whoever replays the trace that much faster sees the same."""
    room = made.headroom
    assert made.met
    assert room is not None
    assert room.over is not None
    own = at_ratio(nine(trace), made.chosen.prefill, made.chosen.decode)
    for load, said in ((room.load, room.attainment), (room.over, room.over_attainment)):
        replayed = msgspec.structs.replace(own, trace=trace.faster(load))
        assert simulate(replayed, made.slo).score.attainment == said
    assert room.attainment >= made.want > room.over_attainment
    (line,) = [a for a in made.advice if a.startswith("what would change the answer: ")]
    assert f"{room.load:.3g} times this load is still met by {room.attainment:.1%}" in line
    assert room.reason in line


def test_slos_that_cannot_be_met_name_the_least_that_works(found: tuple[Sweep, Flights], trace: Trace) -> None:
    missed = answer(found, trace, want=1.0)
    assert not missed.met
    assert missed.headroom is None
    assert missed.advice[0].startswith("no ratio of these workers meets the SLOs for 100%: ")
    assert "the least that 100% keep there is TTFT" in missed.advice[0]


def test_an_answer_of_one_token_must_still_meet_its_ttft(found: tuple[Sweep, Flights]) -> None:
    flight = found[1][0, 9][0]
    saved = flight.outputs, flight.first_token
    try:
        flight.outputs, flight.first_token = 1, flight.arrival + 11.0
        assert not is_good(flight, Slo(10.0, 0.1))
    finally:
        flight.outputs, flight.first_token = saved


def test_classes_take_each_request_once(found: tuple[Sweep, Flights]) -> None:
    flights = found[1][0, 9]
    groups = by_class(flights, {"short": 100, "rest": 1000})
    assert sum(map(len, groups.values())) == len(flights)
    assert all(f.prompt <= 100 for f in groups["short"])


def test_one_worker_has_no_ratio() -> None:
    made = Trace("t", (TraceRequest(0, 10, 10), TraceRequest(1, 10, 10)))
    with pytest.raises(ConfigError, match="two workers"):
        sweep(1, ClusterScenario(SimSettings(0, 1), COSTS, COSTS, made), Slo(1, 1))


def test_the_commands_write_json_a_plot_and_values(tmp_path: Path) -> None:
    flags = ["--trace", str(MOONCAKE), "--profile", "roofline:llama-3-8b@h100", "--seconds", "20"]
    out = {name: str(tmp_path / name) for name in ("a.json", "a.svg", "v.yaml")}
    more = ["--workers", "3", "--json", out["a.json"], "--plot", out["a.svg"], "--helm", out["v.yaml"]]
    done = CliRunner().invoke(app, ["plan", *flags, *more, "--price", "3"])
    assert done.exit_code == 0, done.output
    assert json.loads(Path(out["a.json"]).read_text())["chosen"]["decode"] >= 1
    assert "<svg" in Path(out["a.svg"]).read_text()
    assert "ratio:" in Path(out["v.yaml"]).read_text()
    done = CliRunner().invoke(app, ["sim", *flags, "--prefill", "2", "--decode", "1", "--json", "-"])
    assert done.exit_code == 0, done.output
    plain = json.loads(done.stdout)
    assert plain["result"]["score"]["requests"] > 0
    done = CliRunner().invoke(
        app, ["sim", *flags, "--prefill", "2", "--decode", "1", "--json", "-", "--acceptance", "0.8,0.6"]
    )
    drafted = json.loads(done.stdout)
    assert drafted["acceptance"] == [0.8, 0.6]
    assert drafted["result"]["score"]["tpot"]["mean"] < plain["result"]["score"]["tpot"]["mean"]


@pytest.mark.parametrize(
    "flags",
    [
        ["sim", "--trace", "none.jsonl", "--profile", "laptop"],
        ["sim", "--trace", str(MOONCAKE), "--profile", "none"],
        ["plan", "--trace", str(MOONCAKE), "--profile", "laptop", "--workers", "2", "--from", "9999"],
        ["plan", "--trace", str(MOONCAKE), "--profile", "laptop", "--workers", "2", "--classes", "short"],
        ["plan", "--trace", str(MOONCAKE), "--profile", "laptop", "--workers", "2", "--acceptance", "2"],
        ["plan", "--trace", str(MOONCAKE), "--profile", "laptop", "--workers", "2", "--classes", "a=-1"],
        ["plan", "--trace", str(MOONCAKE), "--profile", "laptop", "--workers", "2", "--classes", "a=1,a=2"],
        ["plan", "--trace", str(MOONCAKE), "--profile", "laptop", "--workers", "2", "--classes", "=5"],
        ["profile", "import", "roofline:llama-3-70b@h100"],
        ["trace", "stats", "none.csv"],
    ],
)
def test_bad_input_is_one_line_and_a_failing_exit_code(flags: list[str]) -> None:
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 1
    assert done.exception is None or isinstance(done.exception, SystemExit)


def test_colocated_workers_are_not_said_to_wait_for_prefill_workers(made: Plan) -> None:
    late = msgspec.structs.replace(made.sweep.colocated.score, late_first=0.5)
    said = miss_reason(msgspec.structs.replace(made.sweep.colocated, score=late, decode_busy=0.9))
    assert "prefill" not in said
    assert "in steps 90% of the time" in said


def test_a_burst_has_no_more_goodput_than_its_cluster_answers(found: tuple[Sweep, Flights], trace: Trace) -> None:
    """A trace that arrives 200 times as fast is over in half a second; its answers take as long as they take."""
    slo = Slo(1e6, 1e6)  # all are good, so that only the time counts
    calm, burst = (simulate(at_ratio(nine(t), 7, 2), slo).score for t in (trace, trace.faster(200)))
    assert calm.good == burst.good == len(trace.requests)
    ended = max(f.last_token for f in simulated(at_ratio(nine(trace.faster(200)), 7, 2)))
    assert burst.goodput == pytest.approx(len(trace.requests) / ended)
    assert burst.goodput < 3 * calm.goodput


def test_what_a_burst_costs_is_what_the_cluster_costs_until_its_last_answer_ends(trace: Trace) -> None:
    burst = trace.between(0, 30).faster(200)
    swept, flights = sweep(2, nine(burst), Slo(1e6, 1e6), window_s=10.0)
    made = plan(swept, flights, nine(burst), Slo(1e6, 1e6), 0.5, CLASSES, price_per_accelerator_hour=2.0)
    assert made.price is not None
    assert made.price.per_million is not None
    tokens = sum(r.input_length + r.output_length for r in burst.requests)
    ended = max(f.last_token for f in flights[made.chosen.prefill, made.chosen.decode])
    assert made.price.per_million == pytest.approx(made.price.per_hour * ended / 3600 / tokens * 1e6)
    least, most = swept.goodput_interval
    assert least <= swept.best.score.goodput <= most


def simulated(scenario: ClusterScenario) -> list[Flight]:
    sim = ClusterSim(scenario)
    sim.run()
    return sim.flights


def test_a_request_years_before_the_others_costs_no_window_for_every_minute_between() -> None:
    """Windows in which nothing arrives are not kept: there would be 28 million, drawn 400 times."""
    late = tuple(TraceRequest(1.7e9 + i, 600, 5) for i in range(5))
    made = Trace("t", (TraceRequest(0.0, 600, 5), *late))
    found, _ = sweep(2, ClusterScenario(SimSettings(0, 2), COSTS, COSTS, made), Slo(10.0, 0.1))
    assert found.best.score.good == 6


def test_what_would_change_the_answer_is_what_is_short() -> None:
    huge = Trace("t", tuple(TraceRequest(i, 9_000_000, 5) for i in range(4)))
    scenario = ClusterScenario(SimSettings(0, 2), COSTS, COSTS, huge)
    made = plan(*sweep(2, scenario, Slo(1.0, 0.1)), scenario, Slo(1.0, 0.1), 0.9, CLASSES)
    assert "workers with more memory for KV: 100.0% of the requests" in made.advice[-1]
    assert [v.reason for v in made.classes] == ["none of them fits a worker's KV pages"]
    calm = Trace("t", tuple(TraceRequest(1000.0 * i, 600, 5) for i in range(9)))
    scenario = ClusterScenario(SimSettings(0, 2), COSTS, COSTS, calm)
    made = plan(*sweep(2, scenario, Slo(10.0, 0.1)), scenario, Slo(10.0, 0.1), 0.9, CLASSES)
    assert made.advice[-1].endswith("64 times this load is still met by 100.0%; more was not tried")


def test_colocated_workers_are_not_said_to_want_fewer_prefill_workers(trace: Trace) -> None:
    costs, slo = worker_costs("roofline:llama-3-8b@h100"), Slo(2.0, 0.05)
    scenario = ClusterScenario(SimSettings(0, 2), costs, costs, trace.between(0, 30))
    made = plan(*sweep(2, scenario, slo), scenario, slo, 0.9, CLASSES)
    assert (made.chosen.prefill, made.met) == (0, False)
    assert made.advice[-1] in (
        "what would change the answer: more reuse or shorter prompts",
        "what would change the answer: shorter answers or a looser TPOT",
    )


def test_values_that_are_printed_in_a_narrow_terminal_are_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    flags = ["--trace", str(MOONCAKE), "--profile", "roofline:llama-3-8b@h100", "--seconds", "4"]
    done = CliRunner().invoke(app, ["plan", *flags, "--workers", "2"])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.stdout[done.stdout.index("# baton plan") :]).keys() >= {"ratio", "workers"}


def test_a_decode_profile_of_another_model_is_refused_before_anything_is_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def simulate(*_: object) -> None:
        raise AssertionError("a ratio was simulated")

    monkeypatch.setattr("baton.planner.sweep.sweep", simulate)
    flags = ["--trace", str(MOONCAKE), "--profile", "roofline:llama-3-8b@h100", "--seconds", "4", "--workers", "2"]
    done = CliRunner().invoke(app, ["plan", *flags, "--decode-profile", "roofline:qwen2.5-7b@h100"])
    assert done.exit_code == 1
    assert "are of different models" in done.stderr


def test_a_measured_profile_is_simulated_with_its_own_chunk() -> None:
    measured, any_chunk = worker_costs("laptop"), worker_costs("roofline:llama-3-8b@h100")
    assert measured.chunk == load_profile("laptop").prefill_chunk == 512
    own = SimSettings(1, 1).with_chunks_of(measured, measured)
    assert (own.prefill_chunk, own.decode_chunk) == (512, 512)
    wide = SimSettings(1, 1).with_chunks_of(any_chunk, any_chunk)
    assert (wide.prefill_chunk, wide.decode_chunk) == (2048, 512)
    flags = ["--trace", str(MOONCAKE), "--profile", "laptop", "--seconds", "4", "--json", "-"]
    done = CliRunner().invoke(app, ["sim", *flags])
    said = json.loads(done.stdout)["result"]["score"]["ttft"]["mean"]
    load = read_trace(str(MOONCAKE)).between(0.0, 4.0)
    assert said == simulate(ClusterScenario(own, measured, measured, load), Slo(10.0, 0.1)).score.ttft.mean


@pytest.mark.parametrize("option", ["--adapter-cost", "--acceptance"])
def test_a_url_at_which_no_router_answers_is_said_of_the_option_that_gave_it(option: str) -> None:
    """The error names the option that took the URL, because these commands have no --url."""
    flags = ["--trace", str(MOONCAKE), "--profile", "laptop", "--seconds", "4"]
    done = CliRunner().invoke(app, ["sim", *flags, option, "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert "no router answers at http://127.0.0.1:1" in done.output
    assert f"write the URL of a router behind {option}" in " ".join(done.output.split())
    assert "--url" not in done.output


def test_seats_of_a_worker_are_those_that_are_asked_for(tmp_path: Path) -> None:
    """A worker of 128 seats was simulated whatever the cluster had: a ratio that fell short there looked best."""
    trace = tmp_path / "t.jsonl"
    line = '{{"timestamp": {}, "input_length": 300, "output_length": 40}}\n'
    trace.write_text("".join(line.format(25 * i) for i in range(60)))
    told = {}
    for seats in ("2", "128"):
        flags = ["--trace", str(trace), "--profile", "laptop", "--max-batch", seats, "--json", "-"]
        done = CliRunner().invoke(app, ["sim", *flags, "--prefill", "2", "--decode", "1"])
        told[seats] = json.loads(done.stdout)["result"]["score"]["ttft"]["mean"]
        planned = CliRunner().invoke(app, ["plan", *flags, "--workers", "3"])
        split = json.loads(planned.stdout)["sweep"]["ratios"][1]
        assert (split["prefill"], split["score"]["ttft"]["mean"]) == (2, told[seats])
        assert f"max_batch: {seats}" in json.loads(planned.stdout)["helm"]
    assert told["2"] > 10 * told["128"]
    refused = CliRunner().invoke(app, ["plan", *flags, "--workers", "3", "--max-batch", "0"])
    assert refused.exit_code == 2
