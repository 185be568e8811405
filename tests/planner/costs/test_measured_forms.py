"""Tests what a sweep measured, as an axis of size, plan and sim: what loses too much or wasn't measured is left
out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from baton.console.main import app
from baton.evaluate.recommend import recommended
from baton.evaluate.sweep import SweepRow
from baton.planner.costs.measured_forms import MeasuredForms
from baton.protos.errors import ConfigError

AZURE = Path(__file__).parents[2] / "data" / "azure_2023_conversation_300.csv"


def row(scheme: str, quantization: str, kv: str, size: float, speed: float, added: float) -> SweepRow:
    speeds = speed, 8 * speed, 20 * speed
    return SweepRow(scheme, size, *speeds, 1.4, added, added - 0.001, added + 0.001, quantization, kv)


ROWS = [
    row("bfloat16", "none", "auto", 10.0, 20.0, 0.0),
    row("bfloat16, int8 KV", "none", "int8", 10.0, 21.0, 0.0001),
    row("int8, on load, int8 KV", "int8", "int8", 5.1, 40.0, 0.0005),
    row("int4, on load, int8 KV", "int4", "int8", 2.9, 70.0, 0.02),
]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.json"
    found = {"model": "m", "rows": ROWS, "recommended": recommended(ROWS)}
    path.write_bytes(msgspec.json.encode(found))
    return path


def size(path: Path, *more: str) -> dict[str, Any]:
    asked = ["size", "--model", "llama-3-70b", "--trace", str(AZURE), "--gpus", "h100,h200", "--seconds", "20"]
    asked += ["--ttft", "10", "--tpot", "0.2", "--most", "16", "--measured", str(path), "--json", "-", *more]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    return {each["accelerator"]: each for each in msgspec.json.decode(result.stdout)}


def test_size_takes_the_forms_whose_measured_loss_is_allowed(sweep: Path) -> None:
    found = size(sweep)
    assert found["h200"]["settings"] == {"quantization": "int8", "kv_cache_dtype": "int8"}
    assert found["h100"]["found"] is None, "int4 loses 2%"
    assert "quantization=int4, kv_cache_dtype=int8 loses 2.00%, allowed are 1.00%" in found["h100"]["why"]
    assert size(sweep, "--most-loss", "0.03")["h100"]["settings"]["quantization"] == "int4"


def test_size_leaves_out_what_was_not_measured(sweep: Path) -> None:
    known = msgspec.json.decode(sweep.read_bytes())
    sweep.write_bytes(msgspec.json.encode(known | {"rows": known["rows"][:2]}))
    asked = ["size", "--model", "llama-3-70b", "--trace", str(AZURE), "--gpus", "h200", "--measured", str(sweep)]
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 1
    assert "quantization=int8, kv_cache_dtype=int8 was not measured" in " ".join(refused.output.split())


@pytest.mark.parametrize("command", ["plan", "sim"])
def test_plan_and_sim_say_what_was_measured_of_a_form_and_refuse_one_that_loses_too_much(
    sweep: Path, command: str
) -> None:
    budget = ["--workers", "2"] if command == "plan" else ["--prefill", "1", "--decode", "1"]
    asked = [command, "--trace", str(AZURE), "--seconds", "10", *budget, "--measured", str(sweep), "--profile"]
    form = "roofline:llama-3-8b@h100,kv_cache_dtype=int8,quantization="
    said = CliRunner().invoke(app, [*asked, f"{form}int8"])
    assert said.exit_code == 0, said.output
    words = " ".join(said.output.split())
    assert "int8, on load, int8 KV loses 0.050% (-0.050% to 0.150%); 40 tok/s alone, 320 of 16" in words
    refused = CliRunner().invoke(app, [*asked, f"{form}int4"])
    assert refused.exit_code == 1
    assert "loses 2.00%, allowed are 1.00%" in " ".join(refused.output.split())


def test_a_pools_form_is_judged_as_the_others_are(sweep: Path) -> None:
    profile = "roofline:llama-3-8b@h100,kv_cache_dtype=int8,quantization="
    asked = ["sim", "--trace", str(AZURE), "--seconds", "10", "--prefill", "1", "--decode", "1"]
    asked += ["--measured", str(sweep), "--profile", f"{profile}int8", "--pool", f"more:decode:1={profile}int4"]
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 1
    assert "loses 2.00%, allowed are 1.00%" in " ".join(refused.output.split())


def test_what_is_no_sweep_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"x.json is no sweep .*baton evaluate MODEL --sweep --json"):
        MeasuredForms.read(str(tmp_path / "x.json"))


def test_each_need_has_its_scheme_and_the_reference_is_always_allowed() -> None:
    assert [each.scheme for each in recommended(ROWS)] == [ROWS[2].scheme, ROWS[3].scheme, ROWS[2].scheme]
    lossy = [ROWS[0], msgspec.structs.replace(ROWS[3], added=0.5, high=0.6)]
    assert {each.scheme for each in recommended(lossy)} == {"bfloat16"}
    unsure = msgspec.structs.replace(ROWS[2], high=0.004)
    assert "its interval ends at +0.400%" in recommended([ROWS[0], unsure])[0].why
