"""What the support table says of an op that ran, did not run, or changed since it ran on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.kernels.cuda import table


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gpu.json"
    monkeypatch.setattr(table, "ON_GPU", path)
    return path


def write(path: Path, **passed: str) -> None:
    rows = [{"part": "checks", "name": op, "value": 1.0, "against": key} for op, key in passed.items()]
    rows.append({"part": "checks", "name": "swiglu", "value": 0.0, "against": table.source_key("swiglu")})
    rows.append({"part": "rows", "name": "rope_append", "value": 1.0, "against": "copy"})
    path.write_text(json.dumps({"machine": "NVIDIA H100", "commit": "abc", "date": "2026-11-21", "rows": rows}))


def gpu_column() -> dict[str, str]:
    return {row[0]: row[-1] for row in table.rows()}


def test_without_results_nothing_has_run_on_a_gpu(results: Path) -> None:
    assert set(gpu_column().values()) == {"no"}
    assert table.NOWHERE in table.text()
    assert "not run on a GPU |" in table.readme()


def test_an_op_whose_checks_passed_by_these_sources_has_run_and_no_other_has(results: Path) -> None:
    write(results, rms_norm=table.source_key("rms_norm"), embedding="sources of another day")
    column = gpu_column()
    assert column.pop("rms_norm") == "yes"
    assert set(column.values()) == {"no"}
    assert "passed on NVIDIA H100 by these very sources (commit abc, 2026-11-21)" in table.text()
    assert table.NOWHERE not in table.text()


def test_the_readmes_table_has_a_row_per_op(results: Path) -> None:
    assert len(table.readme().splitlines()) == 2 + len(gpu_column())
