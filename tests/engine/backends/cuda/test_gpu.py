"""Tests what is said of a GPU that isn't there or won't do: the real driver's absence, and drivers of our own
making.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from baton.cluster.config import load_config
from baton.console.run.serve import on_this_machine
from baton.engine.backends.cuda import gpu
from baton.engine.backends.cuda.gpu import Gpu, identities, probe, require, resolved_device
from baton.engine.backends.torch.card_requirements import takes_kernels
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.protos.errors import ConfigError

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), (13, 0), 80 << 30)

# The calls that probe makes, answering what the flags say.
DRIVER = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int* count) { *count = COUNT; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDriverGetVersion(int* version) { *version = 13020; return 0; }
int cuDeviceGetName(char* name, int size, int device) { strcpy(name, "NVIDIA H200"); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)141 << 30; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) { *value = which == 75 ? 9 : 0; return 0; }
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) { memset(uuid, 16 + device, 16); return 0; }
int cuGetErrorString(int status, const char** text) { *text = "system not yet initialized"; return 0; }
"""


def driver(folder: Path, init: int = 0, count: int = 1) -> str:
    """A libcuda that answers so; compiled, so that what is tested is the calls themselves."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    flags = [f"-DINIT={init}", f"-DCOUNT={count}"]
    subprocess.run([compiler, "-shared", "-fPIC", *flags, str(source), "-o", str(library)], check=True)
    return str(library)


def said(check: object) -> str:
    assert callable(check)
    with pytest.raises(ConfigError) as caught:
        check()
    assert caught.value.param == "worker.device"
    assert "--device cpu" in caught.value.message
    return caught.value.message


def test_what_the_driver_answers_is_read(tmp_path: Path) -> None:
    assert probe(driver(tmp_path)) == Gpu("NVIDIA H200", (9, 0), (13, 2), 141 << 30)


def test_each_card_that_is_seen_has_an_identity(tmp_path: Path) -> None:
    assert identities(driver(tmp_path, count=2)) == ("10" * 16, "11" * 16)
    (tmp_path / "none").mkdir()
    assert "sees no GPU" in said(lambda: identities(driver(tmp_path / "none", count=0)))


def test_without_a_driver_it_says_what_to_install() -> None:
    assert "no NVIDIA driver is here" in said(lambda: probe("libcuda-that-is-not-here.so"))


@pytest.mark.parametrize(("init", "count"), [(100, 0), (0, 0)])
def test_a_driver_without_a_gpu_is_told_apart(tmp_path: Path, init: int, count: int) -> None:
    assert "sees no GPU" in said(lambda: probe(driver(tmp_path, init, count)))


def test_a_driver_that_fails_is_quoted(tmp_path: Path) -> None:
    text = said(lambda: probe(driver(tmp_path, init=802)))
    assert "system not yet initialized (cuInit, 802)" in text


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Gpu("NVIDIA T4", (7, 5), (13, 0), 16 << 30), "T4 has compute capability 7.5, and 8.0 to 12.9 are served"),
        (Gpu("NVIDIA X", (13, 0), (13, 0), 180 << 30), "compute capability 13.0"),
        (Gpu("NVIDIA H100", (9, 0), (12, 4), 80 << 30), "runs CUDA 12.4, and the kernels are .* CUDA 13; update"),
        (Gpu("NVIDIA H100", (9, 0), (13, 0), 16 << 30), "has 16.0 GiB, and the model's weights .* need 21.0 GiB"),
    ],
)  # fmt: skip
def test_a_gpu_that_will_not_do_is_refused_with_the_remedy(found: Gpu, says: str) -> None:
    assert re.search(says, said(lambda: require(20 << 30, lambda: found)))


def test_a_gpu_that_will_do_is_taken() -> None:
    assert require(20 << 30, lambda: H100) is H100


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_cards_are_served_by_torchs_ops_which_the_log_says(
    capability: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    card = Gpu("NVIDIA A100", capability, (13, 0), 80 << 30)
    assert require(20 << 30, lambda: card) is card
    assert takes_kernels(H100)
    assert not takes_kernels(card)
    assert "built for compute capability 9.0 (H100, H200), and NVIDIA A100 has" in caplog.text


def test_auto_takes_the_gpu_where_it_will_do_and_says_why_it_does_not(caplog: pytest.LogCaptureFixture) -> None:
    assert resolved_device("auto", lambda: H100) == "cuda"
    assert resolved_device("auto", lambda: Gpu("NVIDIA T4", (7, 5), (13, 0), 16 << 30)) == "cpu"
    assert "running on the CPU, as NVIDIA T4 has compute capability 7.5" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "cuda", "paced:zero"])
def test_nothing_else_is_ever_replaced(device: str) -> None:
    def never() -> Gpu:
        raise AssertionError("asked")

    assert resolved_device(device, never) == device


def test_auto_is_a_device_of_the_config(tmp_path: Path) -> None:
    assert load_config(None, {"worker": {"device": "auto"}}, search=tmp_path).worker.device == "auto"


def test_the_engine_says_it_before_a_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIBRARY", "libcuda-that-is-not-here.so")
    monkeypatch.setattr(gpu.probe, "__defaults__", ("libcuda-that-is-not-here.so",))
    assert "no NVIDIA driver is here" in said(lambda: load_runner(EngineConfig("/nowhere", device="cuda")))


def test_serve_asks_for_the_gpu_before_it_starts_anything(tmp_path: Path) -> None:
    def served(device: str, found: gpu.Probe, **ray: str) -> str:
        sections = {"worker": {"device": device}, "ray": ray}
        return on_this_machine(load_config(None, sections, search=tmp_path), found).worker.device

    def none() -> Gpu:
        return probe("libcuda-that-is-not-here.so")

    assert served("auto", none) == "cpu"
    assert served("auto", lambda: H100) == "cuda"
    assert served("cuda", lambda: H100) == "cuda"
    assert "no NVIDIA driver" in said(lambda: served("cuda", none))
    assert served("cuda", none, address="10.0.0.1:6379") == "cuda", "the GPU is another machine's"
