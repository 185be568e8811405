"""vLLM's schedule, and two recorded runs given back."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from baton.console.main import app
from baton.planner.costs.operators import PrefillChunk, load_operators
from baton.planner.recorded.validate import validate
from baton.planner.recorded.vllm_engine import RequestTimes, VllmEngine, VllmSettings
from baton.planner.recorded.vllm_run import load_run
from baton.protos.errors import ConfigError
from tests.thorough import first_now

RUNS = Path(__file__).parents[2] / "data" / "vllm_real"


class Recorder:
    """Each step takes a second; what it held is kept."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], int]] = []

    def __call__(self, chunks: Sequence[PrefillChunk], decodes: Sequence[int], finishing: int) -> float:
        self.steps.append(([c.new for c in chunks], len(decodes)))
        return 1.0


def test_a_prompt_is_cut_by_the_budget_and_mixed_with_decodes() -> None:
    steps = Recorder()
    requests = [RequestTimes(0.0, 100, 3), RequestTimes(0.5, 3000, 2)]
    VllmEngine(VllmSettings(1000), steps).run(requests)
    # Step 2 was planned while step 1 ran, before the second request came.
    assert steps.steps == [([100], 0), ([], 1), ([2047], 1), ([953], 0), ([], 1)]
    assert requests[0].first_token == 1.0
    assert requests[1].scheduled == 1.0
    assert requests[1].first_token == 4.0


def test_without_asynchronous_scheduling_a_request_waits_one_step_less() -> None:
    steps = Recorder()
    requests = [RequestTimes(0.0, 100, 3), RequestTimes(0.5, 100, 2)]
    VllmEngine(VllmSettings(1000, async_scheduling=False), steps).run(requests)
    assert requests[1].first_token == 2.0


def test_a_shortage_of_pages_preempts_the_youngest_and_everybody_ends() -> None:
    requests = [RequestTimes(0.0, 64, 100), RequestTimes(0.0, 64, 100), RequestTimes(0.0, 64, 100)]
    engine = VllmEngine(VllmSettings(20), Recorder())
    engine.run(requests)
    assert engine.preemptions > 0
    assert requests[0].preemptions == 0
    assert all(r.last_token > 0 for r in requests)
    engine.pool.check()
    assert engine.pool.snapshot_counts().leases == 0


def test_a_request_is_admitted_only_if_all_of_its_prompt_fits() -> None:
    requests = [RequestTimes(0.0, 160, 40), RequestTimes(0.0, 160, 2)]
    VllmEngine(VllmSettings(15), Recorder()).run(requests)
    assert requests[1].scheduled > requests[0].first_token
    with pytest.raises(ConfigError, match="never fit"):
        VllmEngine(VllmSettings(15), Recorder()).run([RequestTimes(0.0, 500, 2)])


def test_seats_are_limited() -> None:
    requests = [RequestTimes(0.0, 16, 5) for _ in range(4)]
    VllmEngine(VllmSettings(1000, max_num_seqs=2), Recorder()).run(requests)
    assert [r.scheduled == 0.0 for r in requests] == [True, True, False, False]


@pytest.mark.parametrize("name", ["rtx4090_llama-3.1-8b", "rtxpro6000_qwen3-32b"])
def test_a_recorded_run_is_given_back(name: str) -> None:
    run = load_run(str(RUNS / name))
    found = validate(run, load_operators(str(RUNS / name / "profile"), run.tp, run.link))
    errors = {row.metric: row.error for row in found.rows}
    assert abs(errors["tpot"]["mean"] or 0.0) < 0.02
    for metric in ("queue", "scheduled_to_first"):
        assert abs(errors[metric]["mean"] or 0.0) < 0.05
        assert abs(errors[metric]["p99"] or 0.0) < 0.10


def test_a_profile_that_does_not_fit_the_run_is_refused() -> None:
    run = load_run(str(RUNS / "rtx4090_llama-3.1-8b"))
    other = load_run(str(RUNS / "rtxpro6000_qwen3-32b"))
    with pytest.raises(ConfigError, match="profile of qwen3-32b"):
        validate(run, load_operators(str(RUNS / "rtxpro6000_qwen3-32b" / "profile"), 2, other.link))


def test_a_damaged_run_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "rtx4090_llama-3.1-8b", tmp_path / "run")
    file = tmp_path / "run" / "requests.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n{}\n")
    flags = ["sim", "validate", "--run", str(tmp_path / "run"), "--profile", str(tmp_path / "run" / "profile")]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 1
    with pytest.raises(ConfigError, match="line 2"):
        load_run(str(tmp_path / "run"))


def changed(tmp_path: Path, name: str, **changes: object) -> tuple[Path, Path]:
    """A run and its profile, each given function applied to the file it names."""
    run = tmp_path / name
    shutil.copytree(RUNS / name, run)
    files = {"meta": "meta.json", "config": "config.json", "measured": "profile/meta.yaml"}
    for which, change in changes.items():
        file = run / files[which]
        parsed = json.loads(file.read_text()) if which != "measured" else yaml.safe_load(file.read_text())
        change(parsed)  # type: ignore[operator]
        file.write_text(json.dumps(parsed))  # JSON is YAML
    return run, run / "profile"


def errors_of(run: Path, profile: Path) -> dict[str, float | None]:
    found = load_run(str(run))
    rows = validate(found, load_operators(str(profile), found.tp, found.link)).rows
    return {row.metric: row.error["mean"] for row in rows}


@pytest.mark.parametrize("name", first_now(["rtx4090_llama-3.1-8b", "rtxpro6000_qwen3-32b"]))
def test_what_a_run_need_not_say_is_not_needed(tmp_path: Path, name: str) -> None:
    def less(meta: dict) -> None:
        meta["engine_kwargs"].pop("tensor_parallel_size")  # config.json has tp_size
        meta.pop("kv_cache", None)

    run, profile = changed(tmp_path, name, meta=less)
    file, lines = run / "requests.jsonl", []
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    start = recorded[0]["queued_ts"] - 1.0  # clocks may begin anywhere
    for fields in recorded:
        clocks = {k: v - start for k, v in fields.items() if k.endswith("_ts")}
        kept = {k: fields[k] for k in ("input_toks", "output_toks")}
        lines.append(json.dumps(kept | clocks | {"error": None}))
    file.write_text("\r\n".join(lines) + "\r\n\r\n")
    given = errors_of(RUNS / name, RUNS / name / "profile")
    assert errors_of(run, profile)["tpot"] == pytest.approx(given["tpot"], abs=0.005)


def test_requests_without_times_are_left_out_and_counted(tmp_path: Path) -> None:
    run, _ = changed(tmp_path, "rtx4090_llama-3.1-8b")
    file = run / "requests.jsonl"
    first, second, *rest = file.read_text().splitlines()
    cut, refused = json.loads(first) | {"last_token_ts": None}, json.loads(second) | {"output_toks": 0}
    file.write_text("\n".join([json.dumps(cut), json.dumps(refused), *rest]))
    found = load_run(str(run))
    assert (len(found.requests), found.left_out) == (len(rest), 2)
    file.write_text(json.dumps(cut))
    with pytest.raises(ConfigError, match="no request that was answered"):
        load_run(str(run))


def test_a_tuned_model_has_the_sizes_of_its_base(tmp_path: Path) -> None:
    name = "rtxpro6000_qwen3-32b"
    run, profile = changed(tmp_path, name, meta=lambda m: m.update(model="Qwen/Qwen3-32B-Instruct"))
    assert errors_of(run, profile)["tpot"] == pytest.approx(0.013, abs=0.02)


def test_memory_that_only_the_hardware_tells_is_enough(tmp_path: Path) -> None:
    def less(config: dict) -> None:
        config["nodes"][0]["instances"][0].pop("npu_mem")

    run, profile = changed(tmp_path, "rtxpro6000_qwen3-32b", config=less)
    assert errors_of(run, profile)["queue"] == pytest.approx(0.022, abs=0.01)
    run.joinpath("config.json").write_text(run.joinpath("config.json").read_text().replace("RTXPRO6000", "X1"))
    with pytest.raises(ConfigError, match="npu_mem"):
        errors_of(run, profile)


def test_two_engines_of_one_run_are_refused(tmp_path: Path) -> None:
    def two(config: dict) -> None:
        config["nodes"][0]["instances"] *= 2

    run, _ = changed(tmp_path, "rtx4090_llama-3.1-8b", config=two)
    with pytest.raises(ConfigError, match="instances 2"):
        load_run(str(run))


@pytest.mark.parametrize(
    "wrong",
    [{"kv_cache": {"num_gpu_blocks": "many"}}, {"kv_cache": 7}, {"engine_kwargs": {"max_num_seqs": [1]}}],
    ids=str,
)
def test_settings_that_are_no_numbers_are_an_error_of_the_run(tmp_path: Path, wrong: dict) -> None:
    run, profile = changed(tmp_path, "rtx4090_llama-3.1-8b", meta=lambda meta: meta.update(wrong))
    with pytest.raises(ConfigError, match=r"what meta\.json says of the engine can't be read") as found:
        errors_of(run, profile)
    assert found.value.param == "run"


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("engine_kwargs", "max_num_seqs"),
        ("engine_kwargs", "max_num_batched_tokens"),
        ("engine_kwargs", "tensor_parallel_size"),
        ("kv_cache", "num_gpu_blocks"),
        ("kv_cache", "block_size"),
    ],
)
def test_counts_below_one_are_refused_by_name_and_no_simulation_waits_for_ever(
    tmp_path: Path, section: str, name: str
) -> None:
    def wrong(meta: dict) -> None:
        meta.setdefault(section, {})[name] = -1

    run, profile = changed(tmp_path, "rtx4090_llama-3.1-8b", meta=wrong)
    with pytest.raises(ConfigError, match=f"{name} -1; it must be 1 or more"):
        errors_of(run, profile)


def test_the_command_writes_json(tmp_path: Path) -> None:
    home = RUNS / "rtxpro6000_qwen3-32b"
    flags = ["sim", "validate", "--run", str(home), "--profile", str(home / "profile"), "--json", "-"]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0
    assert '"scheduled_to_first"' in done.stdout


def test_runs_of_several_engines_and_unknown_models_are_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "rtx4090_llama-3.1-8b", tmp_path / "run")
    meta, profile = tmp_path / "run" / "meta.json", tmp_path / "run" / "profile" / "meta.yaml"
    meta.write_text(meta.read_text().replace('"data_parallel_size": 1', '"data_parallel_size": 2', 1))
    with pytest.raises(ConfigError, match="data_parallel_size 2"):
        load_run(str(tmp_path / "run"))
    profile.write_text(profile.read_text().replace("meta-llama/Llama-3.1-8B", "us/our-8b"))
    with pytest.raises(ConfigError, match="our-8b"):
        load_operators(str(profile.parent))
    config = {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_operators(str(profile.parent), model=str(tmp_path / "config.json")).shape.name == "our-8b"
