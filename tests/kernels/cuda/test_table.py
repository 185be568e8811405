"""Tests what the support table says of an op that ran, did not run, or changed since it ran on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.kernels.cuda import build, ledger, table
from bench.cuda import paper, shapes
from bench.cuda.extent import ON_CARD


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gpu.json"
    monkeypatch.setattr(table, "ON_GPU", path)
    return path


def all_of(op: str) -> list[str]:
    return list(json.loads(ledger.LEDGER.read_text())["kernels"][op])


def write(path: Path, **passed: str) -> None:
    rows: list[dict[str, Any]] = [
        {"part": "checks", "name": op, "value": 1.0, "against": key, "launched": all_of(op)}
        for op, key in passed.items()
    ]
    rows.append({"part": "checks", "name": "swiglu", "value": 0.0, "against": build.source_key("swiglu")})
    rows.append({"part": "rows", "name": "rope_append", "value": 1.0, "against": "copy"})
    path.write_text(json.dumps({"machine": "NVIDIA H100", "commit": "abc", "date": "2026-11-21", "rows": rows}))


def shape_row(name: str, value: float = 1.0) -> dict[str, Any]:
    return {"part": "shapes", "name": name, "value": value, "against": build.source_key("linear")}


def linear_forms() -> dict[str, str]:
    return {row[1]: row[-1] for row in table.rows() if row[0] == "linear"}


def test_a_form_of_large_shapes_has_run_where_these_were_right_and_not_by_its_ops_suite(results: Path) -> None:
    large, key = "many rows by wgmma: bf16, W8A8, fp8 e4m3", build.source_key("linear")
    write(results, linear=key)
    said = linear_forms()
    assert (said["W8A8"], said[large]) == ("yes", "no")
    kept = json.loads(results.read_text())
    right = [shape_row(f"qkv {form} M=2048") for form in ("bf16", "int8", "fp8 e4m3")]
    for more, wanted in (([], "yes"), ([shape_row("down int8 M=2048", 0.0)], "no")):
        results.write_text(json.dumps(kept | {"rows": kept["rows"] + right + more}))
        assert linear_forms()[large] == wanted
    results.write_text(json.dumps(kept | {"rows": kept["rows"] + [row | {"against": "old"} for row in right]}))
    assert linear_forms()[large] == "no"


def test_a_form_has_run_where_its_kernels_were_launched_and_not_where_its_ops_suite_passed_alone(
    results: Path,
) -> None:
    """Three multiprocessors take other kernels than 132 for a suite's shapes."""
    key = build.source_key("linear")
    write(results, linear=key)
    kept = json.loads(results.read_text())
    kept["rows"][0]["launched"] = [name for name in all_of("linear") if not name.startswith("wide<1")]
    results.write_text(json.dumps(kept))
    said = linear_forms()
    assert (said["W8A8"], said["bf16 weights and rows"], said["W4A16"]) == ("no", "yes", "yes")
    assert table.unlaunched("linear", "W8A8", kept["rows"][0]["launched"]) == ["wide<1, 0>"]
    shape = shape_row("qkv int8 M=256") | {"launched": ["wide<1, 0>"]}
    for value, wanted in ((0.0, "no"), (1.0, "yes")):
        results.write_text(json.dumps(kept | {"rows": [*kept["rows"], shape | {"value": value}]}))
        assert linear_forms()["W8A8"] == wanted


def test_each_kernel_is_of_a_form_and_each_form_has_kernels() -> None:
    compiled = json.loads(ledger.LEDGER.read_text())["kernels"]
    for op, forms in json.loads(table.FORMS.read_text()).items():
        found = {form: table.unlaunched(op, form, ()) for form in forms}
        assert all(found.values())
        assert {kernel for kernels in found.values() for kernel in kernels} == set(compiled[op])


def test_the_suites_launch_every_kernel_that_is_compiled() -> None:
    """By the committed records: a kernel that is in the ledger and in no run is one that no suite reaches."""
    assert {op: left for op, _, _, left in table.launches() if left} == {}


def test_the_page_says_which_kernels_nothing_has_launched(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RAN", tmp_path / "ran.json")
    table.mark_run(["swiglu swiglu<float>", "swiglu gone<1>", "moe route"])
    of = {row[0]: row[1:] for row in table.launches()}
    assert of["swiglu"] == ("1 of 2", "0 of 2", "`swiglu<float4>`")
    write(results, swiglu=build.source_key("swiglu"))
    results.write_text(results.read_text().replace('"value": 0.0', '"value": 1.0'))
    assert {row[0]: row[1:] for row in table.launches()}["swiglu"] == ("1 of 2", "2 of 2", "")
    assert "| moe | 1 of 10 |" in table.text()


def test_records_of_some_ops_are_renewed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RAN", tmp_path / "ran.json")
    table.mark_run(["swiglu swiglu<float>", "moe route"])
    before = json.loads(table.RAN.read_text())
    table.mark_run(["swiglu swiglu<float4>", "moe add_up"], ["moe"])
    after = json.loads(table.RAN.read_text())
    assert after.pop("moe")["launched"] == ["add_up"]
    assert before.pop("moe")["launched"] == ["route"]
    assert after == before


def test_the_large_shapes_are_those_that_the_bench_has(results: Path) -> None:
    """On 132 multiprocessors dispatch takes the form for at least one of these shapes."""
    names = [f"{form} M={m}" for form in shapes.FORMS for m in ON_CARD.forms.m]
    forms = json.loads(table.FORMS.read_text())
    for (op, form), endings in table.LARGE.items():
        assert form in forms[op]
        assert set(endings) <= set(names)
    assert {paper.tile_of(n, 2048) for n, _ in ON_CARD.forms.products.values()} == {paper.MANY}


def gpu_column() -> dict[str, str]:
    return {row[0]: row[-1] for row in table.rows()}


def test_without_results_nothing_has_run_on_a_gpu(results: Path) -> None:
    assert set(gpu_column().values()) == {"no"}
    assert table.NOWHERE in table.text()


def test_an_op_whose_checks_passed_by_these_sources_has_run_and_no_other_has(results: Path) -> None:
    write(results, rms_norm=build.source_key("rms_norm"), embedding="sources of another day")
    column = gpu_column()
    assert column.pop("rms_norm") == "yes"
    assert set(column.values()) == {"no"}
    assert "passed on NVIDIA H100 by these very sources (commit abc, 2026-11-21)" in table.text()
    assert table.NOWHERE not in table.text()


def test_what_is_recorded_is_of_these_sources_or_the_cheap_gate_says_which_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header that an op includes through another header changed since."""
    keys = table.keys()
    ran = {op: {"sources": key, "launched": []} for op, key in keys.items()}
    books = {"RAN": ran, "LEDGER": {"sources": keys}}
    for name, book in books.items():
        (tmp_path / name).write_text(json.dumps(book))
    monkeypatch.setattr(table, "RAN", tmp_path / "RAN")
    monkeypatch.setattr(table.ledger, "LEDGER", tmp_path / "LEDGER")
    monkeypatch.setattr(table, "PAGE", tmp_path / "cuda.md")
    table.PAGE.write_text(table.text())
    assert table.check() == 0
    (tmp_path / "RAN").write_text(json.dumps(ran | {"swiglu": {"sources": "other"}}))
    (tmp_path / "LEDGER").write_text(json.dumps({"sources": keys | {"moe": "other"}}))
    assert table.check() == 1
    said = capsys.readouterr().err
    for line in ("swiglu: its suite ran", "moe: what was compiled", "cuda.md is not"):
        assert line in said
    assert said.count("its suite ran") == said.count("what was compiled") == 1


def test_a_key_is_of_every_header_that_is_included_and_of_no_other() -> None:
    names = {path.name for path in build.sources(build.source("linear"))}
    assert {"device.cuh", "linear.h", "simt.h"} <= names
    assert "narrow_tiles.h" not in names, "it is the CPU's own"


def test_what_a_cpu_alone_includes_is_none_of_a_devices_sources() -> None:
    names = {path.name for path in build.sources(build.source("paged_attention"))}
    assert {"paged.h", "attention.h", "device.cuh"} <= names
    assert not {"kv.h", "vector.h"} & names
