"""The whole path of a plan: `baton plan --helm` -> `baton check -f` -> the chart by the real Helm engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from baton.console.main import app
from baton.console.setup.check import CHART, overlaid
from baton.cost.profiles import FOLDER, load_profile
from baton.planner.chart_values import chart_values
from baton.planner.costs.worker import worker_costs
from baton.planner.simulator.cluster import ClusterScenario, SimSettings
from baton.planner.traces.trace import Trace
from tests.deploy.helm.charts import render_text
from tests.thorough import later

pytestmark = pytest.mark.usefixtures("helm_engine")
DATA = Path(__file__).parents[1] / "data"
BUSY = ["--trace", str(DATA / "mooncake_conversation_400.jsonl"), "--seconds", "4", "--ttft", "20"]
EIGHT_B, SEVENTY_B = "roofline:llama-3-8b@h100", "roofline:llama-3-70b@h200"
KINDS: dict[str, list[str]] = {
    "a ratio": ["--profile", EIGHT_B, "--workers", "3"],
    "widths": ["--profile", EIGHT_B, "--accelerators", "2", "--widths", "1,2"],
    "dollars, classes": ["--profile", EIGHT_B, "--dollars", "4", "--price", "2", "--classes", "tiny=99,rest=99999"],
    "watts": ["--profile", EIGHT_B, "--watts", "1400"],
    "rounded": ["--profile", f"{SEVENTY_B},quantization=int8,kv_cache_dtype=fp8", "--workers", "2"],
    "readers unlike writers": [
        "--profile", EIGHT_B, "--workers", "2", "--decode-profile", "roofline:llama-3-8b@h200",
    ],
    "a paced profile": ["--profile", "h100-llama3-8b", "--workers", "2"],
    "a question that can't be met": ["--profile", EIGHT_B, "--workers", "2", "--tpot", "0.0001"],
}  # fmt: skip


LIKE_ANOTHER = {"a ratio", "watts"}  # beside the widths, and the dollars


def planned(folder: Path, *flags: str) -> tuple[dict[str, Any], Path]:
    """The plan as JSON, and the file with its values."""
    values, answer = folder / "plan.yaml", folder / "plan.json"
    done = CliRunner().invoke(app, ["plan", *BUSY, *flags, "--helm", str(values), "--json", str(answer)])
    assert done.exit_code == 0, done.output
    return json.loads(answer.read_text()), values


def rendered(*files: Path) -> dict[str, dict[str, Any]]:
    """StatefulSets by pool, as the Helm engine renders the values, after `baton check` took them."""
    flags = [flag for file in files for flag in ("-f", str(file))]
    checked = CliRunner().invoke(app, ["check", *flags])
    assert checked.exit_code == 0, checked.output
    values: dict[str, Any] = {}
    for file in files:
        values = overlaid(values, yaml.safe_load(file.read_text()))
    text = render_text(values)["baton/templates/workers-pods.yaml"]
    sets = [m for m in yaml.safe_load_all(text) if m and m["kind"] == "StatefulSet"]
    return {m["metadata"]["labels"]["baton.dev/role"]: m["spec"] for m in sets}


def environment(spec: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in spec["template"]["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize("kind", [later(kind) if kind in LIKE_ANOTHER else kind for kind in KINDS])
def test_a_plan_of_any_kind_becomes_the_workers_that_were_planned(kind: str, tmp_path: Path) -> None:
    plan, values = planned(tmp_path, *KINDS[kind])
    pools = rendered(values)
    chosen = plan["chosen"]
    assert pools["decode"]["replicas"] == chosen["decode"]
    assert pools.get("prefill", {}).get("replicas", 0) == chosen["prefill"]
    for spec in pools.values():
        limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", 0) == (0 if kind == "a paced profile" else 1)


def test_workers_are_set_as_they_were_planned(tmp_path: Path) -> None:
    _, values = planned(tmp_path, *KINDS["rounded"])
    for name, spec in rendered(values).items():
        found = environment(spec)
        assert found["BATON_WORKER__DEVICE"] == "cuda"
        assert found["BATON_WORKER__QUANTIZATION"] == "int8"
        assert found["BATON_WORKER__KV_CACHE_DTYPE"] == "fp8"
        assert int(found["BATON_WORKER__KV_MEMORY_BYTES"]) > 1 << 34
        assert found["BATON_WORKER__PREFILL_CHUNK_TOKENS"] == ("2048" if name == "prefill" else "512")


def test_split_and_colocated_plans_lie_over_an_operators_values(tmp_path: Path) -> None:
    costs = worker_costs(EIGHT_B)
    own = tmp_path / "own.yaml"
    own.write_text((CHART / "values-h100.yaml").read_text() + "\nnameOverride: baton\n")
    site = tmp_path / "site.yaml"
    site.write_text("model: {pvc: {claimName: models}}\ntls: {issuerRef: {name: ca}}\n")
    for prefill, decode in ((3, 2), (0, 4)):
        text = chart_values(ClusterScenario(SimSettings(prefill, decode), costs, costs, Trace("t", ())), met=True)
        (tmp_path / "plan.yaml").write_text(text)
        pools = rendered(own, site, tmp_path / "plan.yaml")
        assert {name: spec["replicas"] for name, spec in pools.items()} == {
            name: count for name, count in (("prefill", prefill), ("decode", decode)) if count
        }


def test_a_plan_that_misses_its_slos_says_so_in_its_values(tmp_path: Path) -> None:
    plan, values = planned(tmp_path, *KINDS["a question that can't be met"])
    assert not plan["met"]
    assert "NOT meet" in values.read_text()


def test_a_plan_for_another_engine_has_no_values(tmp_path: Path) -> None:
    wide = ["plan", *BUSY, "--profile", f"{EIGHT_B}x8", "--workers", "2"]
    refused = CliRunner().invoke(app, wide)
    assert refused.exit_code == 1
    assert "8 accelerators can't run" in refused.output
    both = CliRunner().invoke(app, [*wide, "--hypothetical", "--helm", str(tmp_path / "v.yaml")])
    assert both.exit_code == 1
    assert not (tmp_path / "v.yaml").exists()
    done = CliRunner().invoke(app, [*wide, "--hypothetical", "--json", "-"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["helm"] == ""


def test_workers_of_a_measured_profile_have_its_ranks_and_chunk_and_no_gpu(tmp_path: Path) -> None:
    """A profile that was measured on a CPU asks for no GPU, however many ranks it has."""
    costs = load_profile("laptop")
    ranks = "[ranks]\nshared = 'tp'\ncount = 2\nwidths = [1, 2]\nmeetings = 8\nmeeting_s = 1e-5\n"
    profile = tmp_path / "measured.toml"
    profile.write_text((FOLDER / "laptop.toml").read_text() + ranks)
    _, values = planned(tmp_path, "--profile", str(profile), "--workers", "2", "--ttft", "200")
    for spec in rendered(values).values():
        found = environment(spec)
        assert found["BATON_WORKER__DEVICE"] == "cpu"
        assert found["BATON_WORKER__TP"] == "2"
        assert found["BATON_WORKER__PREFILL_CHUNK_TOKENS"] == str(costs.prefill_chunk)
        assert found["BATON_WORKER__MAX_BATCH"] == str(SimSettings(0, 1).max_batch)
