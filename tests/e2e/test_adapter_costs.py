"""Measures what adapters cost: by native workers as they run, kept in a profile, and added where a plan is made."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from baton.console.main import app
from baton.console.planning import liveprofile
from baton.planner.costs.adapters import NONE_SEEN, added
from baton.planner.costs.paced_file import to_toml
from baton.protos.measurements import AdapterCurve
from tests.e2e.fleet import DRAFT, Fleet, wait_for
from tests.engine.adapters.adapter_files import write

WORKER = {"model": DRAFT, "threads": 1, "max_batch": 8}


def cost_of(fleet: Fleet) -> dict[str, float] | None:
    """Returns what the cluster's one worker says that adapters cost."""
    (worker,) = httpx.get(fleet.url + "/v1/cluster", timeout=60).json()["workers"]
    found: dict[str, float] | None = worker["adapter_cost"]
    return found


def planned(trace: Path, profile: Path, *flags: str) -> Any:
    asked = ["plan", "--trace", str(trace), "--profile", str(profile), "--workers", "2", "--json", "-"]
    return CliRunner().invoke(app, [*asked, *flags])


def advice(trace: Path, profile: Path, *flags: str) -> list[str]:
    """Returns what a plan says of adapters."""
    done = planned(trace, profile, *flags)
    assert done.exit_code == 0, done.output
    return [line for line in json.loads(done.stdout)["advice"] if line.startswith("adapters:")]


@pytest.mark.thorough
def test_what_adapters_cost_a_native_engine_is_measured_and_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LENGTHS": (64, 128), "TOGETHER": ((16, 4),), "BATCHES": (1, 8), "CONTEXTS": (64,)}.items():
        monkeypatch.setattr(liveprofile, name, value)
    monkeypatch.setattr(liveprofile, "ADAPTED_BATCHES", (8,))
    names = ("one", "two")
    for seed, name in enumerate(names):
        write(tmp_path / "adapters" / name, Path(DRAFT), rank=128 << seed, seed=seed, size=0.05)
    trace, profile = tmp_path / "trace.jsonl", tmp_path / "measured.toml"
    lines = [{"timestamp": 200 * at, "input_length": 40, "output_length": 8, "adapter": at % 3} for at in range(30)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    adapters = {"root": str(tmp_path / "adapters"), "max_rank": 256}  # of more work than the model's own layers
    with Fleet(0, 1, colocated=True, worker=WORKER, adapters=adapters) as fleet:
        told: list[str] = []
        bare = asyncio.run(liveprofile.measure(fleet.config, "", 1, told.append))
        assert told[-1] == NONE_SEEN
        assert (bare.costs.adapters, cost_of(fleet)) == (None, None)
        profile.write_text(to_toml(bare.costs, 1000, 2048, 512))
        (line,) = advice(trace, profile)
        assert f"{NONE_SEEN} where the profile is from" in line
        refused = planned(trace, profile, "--adapter-cost", fleet.url)
        assert refused.exit_code == 1
        assert f"{NONE_SEEN} by the workers of that cluster" in refused.output
        for name in names:
            body = {"lora_name": name, "lora_path": name}
            httpx.post(fleet.url + "/v1/load_lora_adapter", json=body, timeout=120).raise_for_status()
        wait_for(lambda: all(len(w.info.adapters) == 2 for w in fleet.roster().values()), what="a report of both")
        found = asyncio.run(liveprofile.measure(fleet.config, "", 1, told.append)).costs
        assert found.adapters is not None
        assert 128 < found.adapters.rank < 256  # rows were on both
        assert min(found.adapters.row, found.adapters.adapter) >= 0  # a busy machine's noise may hide all of it
        assert told[-1] == f"adapters: {added(found.adapters)}"
        profile.write_text(to_toml(found, 1000, 2048, 512))
        (line,) = advice(trace, profile)
        assert f"67% of the tokens, on 2 of them, measured to add {added(found.adapters)}" in line
        now = cost_of(fleet)
        assert now is not None
        seen = added(AdapterCurve(now["row_s"], now["adapter_s"], now["rank"]))
        (line,) = advice(trace, profile, "--adapter-cost", fleet.url)
        assert seen in line
        (line,) = advice(trace, profile, "--adapter-cost", "1.5")
        assert "1.5 times as long" in line
        (slot,) = fleet.roster()
        metrics = httpx.get(f"http://{fleet.record(slot).metrics_address}/metrics", timeout=60).text
        assert "\nbaton_engine_adapter_row_seconds{" in metrics
