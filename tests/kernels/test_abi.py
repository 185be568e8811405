"""Tests how native code is built, found, loaded and threaded."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pytest
import torch

from baton.kernels.abi import build, native
from baton.kernels.abi.compiler import COMPILER_ENV
from baton.kernels.linear import cpu
from baton.kernels.linear.packed import quantize
from baton.kernels.registry import implementation

ROOT = Path(__file__).parents[2]


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=600,
        check=False,
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tree of one op and the pool, not optimized, so that building takes no time; its cache is its own."""
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))
    for name in ("abi", "tiny"):
        (tmp_path / "kernels" / name).mkdir(parents=True)
    for file in ("common.h", "threads.h", "threads.cpp"):
        (tmp_path / "kernels" / "abi" / file).write_text((build.KERNELS / "abi" / file).read_text())
    (tmp_path / "kernels" / "tiny" / "cpu.cpp").write_text(TINY)
    monkeypatch.setattr(build, "KERNELS", tmp_path / "kernels")
    monkeypatch.setenv(build.CACHE_ENV, str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def compiled(small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tree beside one cache of all tests, for those that don't ask how often it is built."""
    monkeypatch.setenv(build.CACHE_ENV, str(tmp_path_factory.getbasetemp() / "compiled"))
    return small


TINY = """#include "../abi/threads.h"
BATON_API int64_t baton_tiny(int32_t tasks) {
  std::atomic<int64_t> sum{0};
  baton::parallel_for(tasks, [&](int32_t task) {
    baton::parallel_for(3, [&](int32_t inner) { sum += task * inner; });
  });
  return sum;
}
"""
TINY = "#include <atomic>\n" + TINY
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no compiler here")


@needs_compiler
def test_a_library_is_built_once_and_anew_when_a_source_or_a_flag_changes(small: Path) -> None:
    first = build.built("plain")
    assert build.built("plain") == first
    assert build.built("plain", ("-DBATON_MUTATION_X",)) != first
    source = small / "kernels" / "tiny" / "cpu.cpp"
    objects = set(first.parent.glob("*.o"))
    source.write_text(TINY + "// changed\n")
    assert build.built("plain") != first
    assert len(set(first.parent.glob("*.o")) - objects) == 1  # what didn't change isn't compiled again


@needs_compiler
def test_builders_at_the_same_time_make_one_library(small: Path) -> None:
    found: list[Path] = []
    builders = [threading.Thread(target=lambda: found.append(build.built("plain"))) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert not list(found[0].parent.glob("tmp*"))


@needs_compiler
def test_every_task_runs_once_nested_or_from_several_callers(compiled: Path) -> None:
    library = ctypes.CDLL(str(build.built("plain")))
    tiny = native.declare(library, "tiny", native.I32, result=native.I64)
    library.baton_set_threads(3)
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(tasks for tasks in (0, 1, 2, 7, 1000) if tiny(tasks) != 3 * tasks * (tasks - 1) // 2)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@needs_compiler
def test_a_forked_child_has_a_pool_of_its_own(compiled: Path) -> None:
    code = f"""
import ctypes, os
library = ctypes.CDLL({str(build.built("plain"))!r})
library.baton_tiny.restype = ctypes.c_int64
library.baton_set_threads(3)
assert library.baton_tiny(50) == 3675
child = os.fork()
if child == 0:
    os._exit(0 if library.baton_tiny(50) == 3675 else 1)
raise SystemExit(os.waitpid(child, 0)[1])
"""
    assert run(code).returncode == 0


@needs_compiler
def test_what_the_compiler_says_is_in_the_error(compiled: Path) -> None:
    (compiled / "kernels" / "tiny" / "cpu.cpp").write_text("this is no C++\n")
    with pytest.raises(build.BuildError, match="this is no C"):
        build.built("plain")


def test_no_compiler_is_an_error_that_names_what_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILER_ENV, "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.built("plain")


def test_a_cache_that_cannot_be_written_is_an_error_that_says_how_to_name_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(build.CACHE_ENV, str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match=r"BATON_CACHE_DIR|compiler"):
        build.built("plain")


def test_without_a_compiler_ops_are_their_references_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(COMPILER_ENV, "no-such-compiler")
    monkeypatch.delenv(build.PREBUILT_ENV, raising=False)
    monkeypatch.setattr(native, "library", cache(native.library.__wrapped__))
    weight = quantize(torch.randn(8, 16), 8, 0)
    with caplog.at_level(logging.WARNING, "baton.kernels"):
        for _ in range(3):
            assert implementation("linear", "cpu")(torch.randn(2, 16), weight).shape == (2, 8)
    assert caplog.text.count("no native kernels") == 1


def test_an_isa_that_this_cpu_lacks_or_nobody_knows_is_refused_by_name() -> None:
    done = run("from baton.kernels.abi.native import isa; isa()", BATON_ISA="avx1024")
    assert "BATON_ISA=avx1024: this CPU can run" in done.stderr


@pytest.mark.parametrize("isa", ["plain", "reference"])
def test_a_named_isa_is_the_one_that_runs(isa: str) -> None:
    code = "from baton.kernels.abi import native; print(native.isa(), native.library() is None)"
    assert run(code, BATON_ISA=isa).stdout.split() == [isa, str(isa == "reference")]


@needs_compiler
def test_the_registry_takes_the_native_op() -> None:
    assert implementation("linear", "cpu") is cpu.linear
    weight = quantize(torch.randn(70, 40), 8, 0)
    assert implementation("linear", "cpu")(torch.randn(3, 40), weight).shape == (3, 70)


def test_threads_can_be_set_before_and_after_the_library_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    code = """
from baton.kernels.abi import native
native.set_threads(3)
if native.library() is not None:
    threads = native.function("threads", result=native.I32)
    assert threads() == 3
    native.set_threads(5)
    assert threads() == 5
"""
    assert run(code).returncode == 0


def old_compiler(folder: Path) -> Path:
    """A compiler that knows no AVX-VNNI and lists what it is asked to compile."""
    made = folder / "old-compiler"
    made.write_text(
        '#!/bin/sh\ncase "$*" in\n*mavxvnni*) echo "$@" >> "$0.asked"; '
        'echo "error: unrecognized command-line option \'-mavxvnni\'" >&2; exit 1;;\nesac\nexec g++ "$@"\n'
    )
    made.chmod(0o755)
    return made


@needs_compiler
def test_a_compiler_that_knows_no_avx_vnni_is_asked_by_an_empty_file_and_compiles_nothing_of_it(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = old_compiler(small)
    monkeypatch.setenv(COMPILER_ENV, str(made))
    with caplog.at_level(logging.WARNING, "baton.kernels"):
        first = native.newest("avx_vnni")
    assert first.name.startswith("baton-avx2-")
    assert "no avx_vnni, avx2 is used" in caplog.text
    assert "-mavxvnni" in caplog.text
    assert native.newest("avx_vnni") == first
    asked = Path(f"{made}.asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == [os.devnull] * 2, "the empty file, once a start"


@needs_compiler
def test_a_library_built_ahead_is_taken_whatever_the_compiler_knows(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build.PREBUILT_ENV, str(small))
    ahead = small / build.prebuilt_name("avx_vnni", (*build.FLAGS, *build.ISA_FLAGS["avx_vnni"]))
    ahead.touch()
    monkeypatch.setenv(COMPILER_ENV, str(old_compiler(small)))
    assert native.newest("avx_vnni") == ahead


def test_an_older_library_built_ahead_is_taken_where_there_is_no_compiler(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build.PREBUILT_ENV, str(small))
    monkeypatch.setenv(COMPILER_ENV, str(small / "none"))
    ahead = small / build.prebuilt_name("avx2", (*build.FLAGS, *build.ISA_FLAGS["avx2"]))
    with pytest.raises(build.BuildError):
        native.newest("avx_vnni")
    ahead.touch()
    assert native.newest("avx_vnni") == ahead


def test_a_compiler_too_old_for_avx_vnni_still_builds_what_avx2_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def built(isa: str) -> Path:
        asked.append(isa)
        if isa == "avx_vnni":
            raise build.BuildError("unrecognized command-line option '-mavxvnni'")
        return Path("library.so")

    monkeypatch.setattr(native, "built", built)
    assert native.newest("avx_vnni") == Path("library.so")
    assert asked == ["avx_vnni", "avx2"]
    monkeypatch.setattr(native, "_OLDER", {})
    with pytest.raises(build.BuildError, match="mavxvnni"):
        native.newest("avx_vnni")
