"""A step by torch's ops one by one: the bits of the native call, seen by a profiler, held to references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.engine.backends.native.runner import NativeRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.kernels.abi import native
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make, prompts
from tests.conformance.drive import Driver
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

SAMPLING = Sampling(temperature=0.0, max_tokens=4, logprobs=2)
KINDS: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
    {"quantization": "int4", "kv_cache_dtype": "bf16"},
]


@pytest.fixture(scope="module", params=first_now(["qwen2_mixed", "qwen3"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.checkpoints.packed_cache.cache_dir", lambda: tmp_path)


def load(model: Path, monkeypatch: pytest.MonkeyPatch, by: str, check: str = "", **fields: Any) -> NativeRunner:
    monkeypatch.setenv("BATON_STEP", by)
    monkeypatch.setenv("BATON_CHECK_STEP", check)
    found = load_runner(EngineConfig(str(model), threads=2, **fields))
    assert isinstance(found, NativeRunner)
    return found


@pytest.mark.parametrize("kind", first_now(KINDS[::-1], 2), ids=str)
def test_ops_one_by_one_have_the_bits_of_the_native_step(
    model: Path, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for by in ("", "ops"):
        engine = load(model, monkeypatch, by, **kind)
        assert (engine._ops is not None) == (by == "ops")
        driver = Driver(engine, pages=100, chunk=70)
        asked = [prompt[:150] for prompt in prompts(engine.spec.vocab_size, count=5, seed=5)]
        found.append((driver.answer(asked, SAMPLING), driver.logprobs))
    assert found[0] == found[1]


def test_ops_one_by_one_are_their_references(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(model, monkeypatch, "ops", check="1", kv_cache_dtype="int8")
    Driver(engine, pages=40, chunk=20).answer([[5, 6, 7], list(range(2, 40))], SAMPLING)


@pytest.mark.parametrize(
    ("by", "check", "said"), [("op", "", "BATON_STEP is 'op'; set it to ops"), ("", "yes", "to 1,")]
)
def test_a_switch_that_says_nothing_known_is_refused_before_anything_is_loaded(
    by: str, check: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(Path("no such model"), monkeypatch, by, check)


def test_the_profiler_names_every_op_of_a_layer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(model, monkeypatch, "ops")
    pages = [0, 1]
    engine.bind(memoryview(bytearray(2 * engine.spec.layout.page_bytes)), 2)
    spec = SampleSpec(msgspec.structs.replace(SAMPLING, logprobs=None), 0, 3, [4, 5, 6], 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.run(StepPlan((SequenceStep(0, [4, 5, 6], 0, pages, spec),)))
    names = {event.key for event in profile.key_averages()}
    wanted = ("embedding", "rms_norm", "linear", "rope_append", "paged_attention", "swiglu")
    assert {f"baton::{op}" for op in wanted} <= names
