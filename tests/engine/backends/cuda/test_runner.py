"""``--device cuda`` through the engine, its kernels on the SIMT shim: from a checkpoint to answers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from baton.engine.backends.cuda import gpu
from baton.engine.backends.cuda import load as cuda_load
from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.load import lacking
from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.wide_pages import WidePages
from baton.kernels.abi import native
from baton.kernels.abi.build import BuildError
from baton.kernels.cuda import library
from baton.kv.memory import cuda_driver
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.kernels.compilers import needs_compiler
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
PROMPTS = [[5, 17, 90, 3, 44, 61, 7], [int(i * 7 % 199) for i in range(19)]]
DRAWN = Sampling(temperature=0.8, seed=3, max_tokens=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), "llama2", **ONE_LAYER)


@pytest.fixture
def on_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SIMT_ENV, "1")
    library.device.cache_clear()
    with needs_compiler():
        library.device()


def config(model: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(str(model), **({"dtype": "bfloat16", "threads": 1} | fields))


@pytest.mark.parametrize(
    "fields",
    first_now([{"quantization": "int8", "kv_cache_dtype": "int8"}, {}, {"cuda_step": "mega"}]),
    ids=["int8 weights and KV", "bf16", "by the megakernel"],
)
def test_a_checkpoint_is_loaded_and_answers_as_on_the_cpu(
    model: Path, on_shim: None, tmp_path: Path, fields: dict[str, str]
) -> None:
    cpu = load_runner(config(model, cache_dir=str(tmp_path), **fields))
    found = load_runner(config(model, device="cuda", cache_dir=str(tmp_path), **fields))
    assert isinstance(cpu, NativeRunner)
    assert isinstance(found, CudaRunner)
    assert found.spec.fingerprint == cpu.spec.fingerprint
    assert found.spec.layout == cpu.spec.layout  # so that either hands over to the other
    for want, have in zip(*(trials._run(runner, seed=4, long=False) for runner in (cpu, found)), strict=True):
        assert list(trials._off(want, have)) == []
    answers = Driver(found, pages=12, chunk=8).answer(PROMPTS, DRAWN)
    assert [len(tokens) for tokens in answers] == [5, 5]
    assert (found.counts()["at_once"] > 0) == ("cuda_step" in fields)
    assert Driver(found, pages=12, chunk=8, seed=3).answer(PROMPTS, DRAWN) == answers  # on other pages
    counts = found.counts()
    assert counts["captured"] >= 1
    assert counts["replayed"] >= 2
    found.close()


@pytest.mark.thorough
def test_pages_of_another_size_lie_over_it(model: Path, on_shim: None) -> None:
    found = load_runner(config(model, device="cuda"))
    assert isinstance(found, CudaRunner)
    quiet = Sampling(temperature=0.0, max_tokens=3)
    narrow = Driver(found, pages=12).answer(PROMPTS[:1], quiet)
    wide = WidePages(found, 32)
    wide.bind(memoryview(bytearray(6 * wide.spec.layout.page_bytes)), 6)
    assert narrow[0]
    found.close()


def test_pages_that_cannot_be_pinned_end_the_start_with_what_to_do(
    model: Path, on_shim: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_runner(config(model, device="cuda"))
    assert isinstance(found, CudaRunner)
    call = found._device.call

    def refuse(name: str, *arguments: object) -> None:
        if name == "session_bind":
            raise library.DeviceError("session_bind: out of memory (status 2)")
        call(name, *arguments)

    says = r"KV pages can't be pinned.*out of memory.*lower worker\.kv_memory_bytes"
    with monkeypatch.context() as patched:
        patched.setattr(found._device, "call", refuse)
        with pytest.raises(ConfigError, match=says):
            found.bind(memoryview(bytearray(4 * found.spec.layout.page_bytes)), 4)
    found.close()


def test_without_a_driver_the_cards_pages_are_not_shared_and_the_log_says_so(
    model: Path, on_shim: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-is-not-here.so.1")
    found = load_runner(config(model, device="cuda"))
    assert isinstance(found, CudaRunner)
    found.bind(memoryview(bytearray(4 * found.spec.layout.page_bytes)), 4)
    assert found.mirror is None
    assert "the device's pages are not shared, KV leaves by the host's" in caplog.text
    found.close()


def test_without_a_library_torchs_ops_are_taken_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere() -> None:
        raise BuildError("no CUDA compiler (nvcc) on PATH")

    monkeypatch.setattr(cuda_load, "device", nowhere)
    assert cuda_load.kernels_or_none() is None
    assert "the GPU runs torch's ops, not the engine's own kernels: no CUDA compiler" in caplog.text


@pytest.mark.parametrize(
    ("kv", "changes", "says"),
    [
        ("bfloat16", {}, ""),
        ("float32", {}, "attention reads KV as bf16, int8 or fp8"),
        ("int8", {"head_dim": 24}, "a multiple of 16, up to 256, and this is 24"),
        ("bfloat16", {"head_dim": 320}, "up to 256, and this is 320"),
    ],
)
def test_what_no_kernel_does_is_said(tmp_path: Path, kv: str, changes: dict[str, int], says: str) -> None:
    program = program_for(ModelConfig.read(make(tmp_path, "llama2", **ONE_LAYER, **changes)))
    assert re.search(says, lacking(program, kv)) if says else not lacking(program, kv)


def test_kernels_that_answer_otherwise_than_the_cpus_are_not_taken(
    model: Path, on_shim: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = load_runner(config(model, device="cuda"))
    assert isinstance(found, CudaRunner)
    program = found._program.program
    monkeypatch.setattr(cuda_load, "on_shim", lambda: False)
    monkeypatch.setattr(cuda_load, "trial", lambda *_, **__: "step 2 of the trial: a hidden state is 9.0e-01 off")
    assert cuda_load.on_kernels(found.spec, program, {}, library.device()) is None
    assert "step 2 of the trial" in caplog.text
    found.close()


def test_a_gpu_that_is_not_here_is_still_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.SIMT_ENV, raising=False)
    monkeypatch.setattr(gpu.probe, "__defaults__", ("libcuda-that-is-not-here.so",))
    with pytest.raises(ConfigError, match="no NVIDIA driver is here"):
        load_runner(EngineConfig("/nowhere", device="cuda"))
