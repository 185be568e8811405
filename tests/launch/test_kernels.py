"""A start compiles kernels before its time counts, where workers here need some that aren't there."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cluster.config import BatonConfig, load_config
from baton.kernels.abi import build, native
from baton.launch.kernels import compilation
from tests.kernels.conftest import needs_native

pytestmark = needs_native


def config(**sections: dict[str, str]) -> BatonConfig:
    return load_config(flags=sections, search=Path("/nowhere"))


def test_what_is_missing_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compilation(config()) is None, "this process has them"
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    command = compilation(config())
    assert command is not None
    assert command[1:] == ["-m", "baton.kernels.abi.native"]
    monkeypatch.setattr(build, "_build", lambda compiler, flags, objects, library: library.touch())
    build.built(native.isa())
    assert compilation(config()) is None


def test_a_compiler_too_old_for_this_cpu_compiles_what_it_knows_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "isa", lambda: "avx_vnni")
    monkeypatch.setattr(native, "refusal", lambda isa: "it is too old")
    assert compilation(config()) is not None
    monkeypatch.setattr(build, "_build", lambda compiler, flags, objects, library: library.touch())
    build.built("avx2")
    assert compilation(config()) is None, "a worker loads avx2's"


@pytest.mark.parametrize("device", ["paced:zero", "cuda"])
def test_workers_of_other_devices_copy_blocks_by_kernels_which_are_compiled_for_them(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    assert compilation(config(worker={"device": device})) is not None


def test_nothing_is_compiled_for_other_machines_or_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    assert compilation(config(ray={"address": "10.0.0.1:6379"}, redis={"url": "redis://10.0.0.1"})) is None
    monkeypatch.setenv("BATON_CXX", "no-compiler-of-this-name")
    assert compilation(config()) is None
