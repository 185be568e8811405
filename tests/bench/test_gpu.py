"""bench/gpu.py without a GPU: rows, table, arguments, and every measured call once over the SIMT shim."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.kernels.cuda import build, on_gpu
from baton.kernels.cuda.library import CudaLibrary
from bench import gpu
from bench.cuda import cases, checks, dry, prompts, rows, served, small, step
from bench.cuda.rows import Ceilings, Row, Sample, absent, merged, rated, versus
from tests.kernels.compilers import needs_compiler

TOP = Ceilings(3e12, 2.8e12, 8e14)
HERE = rows.Where("NVIDIA H100 80GB HBM3", "abc1234", "2026-11-21 09:00 UTC")


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


def test_parts_are_taken_in_order_and_what_the_time_does_not_allow_is_said() -> None:
    def part(name: str, seconds: float) -> Any:
        def make(until: float) -> Iterator[Row]:
            assert until > time.monotonic()
            yield Row(part=name, name="one", value=1.0)
            time.sleep(seconds)
            if name == "broken":
                raise RuntimeError("an illegal address")
            yield Row(part=name, name="two", value=2.0)

        return name, make

    until = time.monotonic() + gpu.LEAST_S + 0.5
    parts = [part("quick", 0), part("broken", 0), part("slow", 0.7), part("late", 0)]
    found = [(row.part, row.name, row.said) for row in gpu.within(parts, until)]
    assert [each[:2] for each in found] == [
        *(("quick", "one"), ("quick", "two"), ("broken", "one"), ("broken", "the rest")),
        *(("slow", "one"), ("slow", "two"), ("slow", "the rest"), ("late", "all")),
    ]
    assert found[3][2] == "RuntimeError: an illegal address"
    assert "--only late" in found[-1][2]


def test_every_op_has_a_file_of_checks() -> None:
    asked = checks.files()
    assert {op for ops in asked for op in ops} == set(build.ops())
    assert len({file for files in asked.values() for file in files}) == sum(map(len, asked.values()))


def test_pytests_words_become_a_row() -> None:
    assert checks.ran_something("..s..     [100%]\n5 passed in 2s\n")
    assert not checks.ran_something("sssss     [100%]\n5 skipped in 2s\n")
    assert checks.summary("x\nE   AssertionError: off by 3\n1 failed\n") == "E AssertionError: off by 3"
    assert checks.summary("....  [100%]\n4 passed in 3.1s\n") == "4 passed in 3.1s"
    assert checks.run(["python"], ["tests/x.py"], time.monotonic()) == (
        "not run: the time was up; take it up with --only checks",
        None,
    )


def test_memory_of_the_programs_own_is_found_in_its_map() -> None:
    maps = (
        "55d0c0000000-55d0c0200000 rw-p 00000000 00:00 0                          [heap]\n"
        "7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n"
        "7f1000000000-7f1000001000 r-xp 00000000 08:01 1234                       /usr/lib/libc.so.6\n"
        "7f2000000000-7f2000001000 rw-p 00002000 08:01 1234                       /usr/lib/libc.so.6\n"
        "7f3000000000-7f9000000000 rw-p 00000000 00:00 0 \n"
        "7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0                          [stack]\n"
    )
    assert on_gpu.writable(maps) == [(0x55D0C0000000, 0x200000), (0x7F0000000000, 0x1000)]


@pytest.fixture
def shim() -> Iterator[CudaLibrary]:
    """Sizes that the shim manages; every call runs once, on the CPU."""
    with needs_compiler(), dry.tiny() as device:
        yield device


@pytest.mark.thorough
def test_every_measured_call_runs_without_a_gpu(shim: CudaLibrary) -> None:
    """What is proved are the calls, not figures."""
    found = list(dry.parts(shim))
    assert [(row.name, row.said) for row in found if row.value is None] == []
    assert {row.part for row in found} == {"ceilings", *gpu.OPS, gpu.STEP}


def test_each_part_has_a_place_in_the_plan() -> None:
    made = {**cases.PARTS, **small.PARTS, **prompts.PARTS}
    assert tuple(made) == gpu.OPS


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
