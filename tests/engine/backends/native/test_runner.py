"""The native step through its runner: bits free of company, the op-by-op check, KV dtypes, fall-backs."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from baton.engine.backends import loading
from baton.engine.backends.cuda.gpu import CAPABILITY, Gpu
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.backends.torch.runner import DTYPES, TorchRunner
from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.config import KV_NAMES, EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import Linear
from baton.kernels.abi import native
from baton.kernels.linear.packed import quantize
from baton.protos.errors import BatonError, ConfigError
from baton.protos.nouns import Sampling
from baton.worker.drafts import make_drafter
from baton.worker.spec import EngineSpec
from tests.conformance.checkpoints import make, prompts
from tests.conformance.drive import Driver
from tests.thorough import first_now, later

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

SPOKEN = Sampling(temperature=0.0, max_tokens=20, logprobs=2)
DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=11, max_tokens=20, repetition_penalty=1.1)
KINDS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "kv_cache_dtype": "int8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16", "bits": 8},
    {"dtype": "bfloat16", "bits": 4, "kv_cache_dtype": "int8"},
]


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("latent"), "deepseek_v3")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("hybrid"), "qwen3_next")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), "qwen2_mixed")


def load(model: Path, check: bool = False, bits: int = 0, **fields: Any) -> NativeRunner:
    config = EngineConfig(str(model), threads=2, **fields)
    if not bits:
        found = load_runner(config)
        assert isinstance(found, NativeRunner)
        weights = weights_of(model, fields.get("dtype", "float32"))
        return NativeRunner(found.spec, found._program.program, weights, check=True) if check else found
    plain = load(model, **fields)
    weights = weights_of(model, fields["dtype"])
    for op in plain._program.ops:
        if isinstance(op, Linear):
            weights[op.weight] = quantize(weights[op.weight], bits, 32 if bits == 4 else 0)
    return NativeRunner(plain.spec, plain._program.program, weights, check=check)


def weights_of(model: Path, dtype: str) -> dict[str, Any]:
    program = program_for(ModelConfig.read(model))
    return dict(Checkpoint(model).weights(program.weights, DTYPES[dtype], "cpu"))


def answers(engine: NativeRunner, asked: list[list[int]], sampling: Sampling, **how: Any) -> list[Any]:
    """Tokens, and likelihoods where they were asked for: to the last bit."""
    driver = Driver(engine, pages=400, **how)
    tokens = driver.answer(asked, sampling)
    return [(found, driver.logprobs.get(key)) for key, found in enumerate(tokens)]


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [(KINDS[0], SPOKEN), (KINDS[3], DRAWN), (KINDS[5], SPOKEN)]
    + [later(kind, DRAWN if at in (0, 5) else SPOKEN) for at, kind in enumerate(KINDS)]
    + [later(KINDS[at], DRAWN) for at in (1, 2, 4)],
    ids=str,
)
def test_an_answer_has_the_same_bits_alone_batched_chunked_and_replayed(
    model: Path, kind: dict[str, Any], sampling: Sampling
) -> None:
    engine = load(model, **kind)
    asked = [prompt[:290] for prompt in prompts(engine.spec.vocab_size, count=7, seed=3)]
    together = answers(engine, asked, sampling, chunk=1024)
    assert answers(engine, asked, sampling, chunk=16, seed=1) == together
    assert answers(engine, asked, sampling, chunk=61, seed=2) == together
    alone = [answers(engine, [prompt], sampling, seed=3)[0] for prompt in asked]
    assert alone == together
    for prompt, (tokens, _) in zip(asked[-3:], together[-3:], strict=True):
        rest = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - 7, repetition_penalty=1.0)
        whole = msgspec.structs.replace(sampling, repetition_penalty=1.0)
        first = answers(engine, [prompt], whole)[0][0]
        assert answers(engine, [prompt + first[:7]], rest)[0][0] == first[7:]
        assert len(tokens) == sampling.max_tokens


@pytest.mark.parametrize("kind", first_now(KINDS[::-1], 3), ids=str)
def test_every_op_of_a_step_is_its_references(model: Path, kind: dict[str, Any]) -> None:
    engine = load(model, check=True, **kind)
    asked = [prompt[:150] for prompt in prompts(engine.spec.vocab_size, count=5, seed=5)]
    sampling = msgspec.structs.replace(SPOKEN, max_tokens=4)
    Driver(engine, pages=100, chunk=70).answer(asked, sampling)


def test_the_check_notices_a_step_that_computes_something_else(model: Path) -> None:
    engine = load(model, check=True)
    weight = engine._program.weight("0.o")
    assert isinstance(weight, torch.Tensor)
    weight[3] += 1.0  # what the reference sees; the packed copy stays
    with pytest.raises(BatonError, match=r"op 5 Linear.* off its reference"):
        Driver(engine, pages=8).answer([[5, 6, 7]], SPOKEN)


def test_the_checks_variable_turns_it_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CHECK_STEP", "1")
    assert load(model)._check is not None


@pytest.mark.parametrize("stored", ["bf16", "int8", "fp8"])
def test_stored_kv_takes_less_room_and_says_so_in_its_fidelity(model: Path, stored: str) -> None:
    whole, small = load(model).spec.layout, load(model, kv_cache_dtype=stored).spec.layout
    group = whole.groups[0]
    row = {"bf16": 2 * group.head_dim, "int8": group.head_dim + 4, "fp8": group.head_dim + 4}[stored]
    assert small.page_bytes * 4 * group.head_dim == whole.page_bytes * row
    assert small.fidelity not in (
        whole.fidelity,
        load(model, dtype="bfloat16", kv_cache_dtype=stored).spec.layout.fidelity,
    )


def test_likelihoods_of_stored_kv_are_near(model: Path) -> None:
    prompt = prompts(1024, count=6, seed=1)[5][:200]
    found = {}
    for stored in ("float32", "bf16", "fp16", "int8", "fp8"):
        driver = Driver(load(model, kv_cache_dtype=stored), pages=40)
        driver.answer([prompt], msgspec.structs.replace(SPOKEN, max_tokens=1))
        found[stored] = driver.logprobs[0][0].chosen.logprob
    assert found["bf16"] == pytest.approx(found["float32"], abs=0.1)
    assert found["fp16"] == pytest.approx(found["float32"], abs=0.02)
    assert found["int8"] == pytest.approx(found["float32"], abs=0.2)
    assert found["fp8"] == pytest.approx(found["float32"], abs=0.6)


def test_a_table_with_a_foreign_page_is_refused_before_it_is_read(model: Path) -> None:
    engine = load(model)
    buffer = bytearray(4 * engine.spec.layout.page_bytes)
    engine.bind(memoryview(buffer), 4)
    history = [1] * 40
    spec = SampleSpec(SPOKEN, 0, 40, history, 40)
    for foreign in (-1, 4):
        with pytest.raises(BatonError, match="outside"):
            engine.run(StepPlan((SequenceStep(0, [1], 39, [foreign, 1, 2], spec),)))


def test_without_a_compiler_the_reference_runs_and_quantized_kv_is_refused_in_words(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(1024, count=4)
    natively = Driver(load(model), pages=80).answer(asked, SPOKEN)
    nothing = SimpleNamespace(library=lambda: None, set_threads=lambda count: None)
    monkeypatch.setattr(loading, "native", nothing)
    plain = load_runner(EngineConfig(str(model), threads=1))
    assert isinstance(plain, TorchRunner)
    assert Driver(plain, pages=80).answer(asked, SPOKEN) == natively
    with pytest.raises(ConfigError, match="compiler"):
        load_runner(EngineConfig(str(model), kv_cache_dtype="int8"))


def test_an_unknown_kv_dtype_lists_the_choices(model: Path) -> None:
    with pytest.raises(ConfigError, match="int8 or fp8"):
        load_runner(EngineConfig(str(model), kv_cache_dtype="int3"))  # type: ignore[arg-type]
    assert set(KV_NAMES) == {"float32", "bf16", "fp16", "int8", "fp8"}


@pytest.mark.parametrize(("kind", "check"), [("latent", True), later("latent", False), later("hybrid", True)])
def test_ops_without_native_code_run_between_the_others_and_give_torchs_tokens(
    kind: str, check: bool, request: pytest.FixtureRequest
) -> None:
    asked, model = prompts(1003, count=4), request.getfixturevalue(kind)
    engine = load(model, check=check)
    plain = TorchRunner(engine.spec, engine._program.program, weights_of(model, "float32"))
    whole = answers(engine, asked, SPOKEN, chunk=33)
    assert [tokens for tokens, _ in whole] == Driver(plain, pages=100, chunk=50).answer(asked, SPOKEN)


def test_quantized_weights_and_bf16_latents_run_as_well(latent: Path) -> None:
    engine = load(latent, dtype="bfloat16", quantization="int8")
    (alone,), *rest = [answers(engine, prompts(1003, count=3)[at:], SPOKEN)[:1] for at in (0, 1)]
    assert len(alone[0]) == 20
    assert rest


@pytest.mark.parametrize(
    ("fields", "named"), [({"kv_cache_dtype": "int8"}, "KV as int8"), ({"device": "cuda"}, "device cuda")]
)
def test_what_latent_attention_lacks_is_refused_by_name(
    latent: Path, fields: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "require", lambda *_: Gpu("a card", CAPABILITY, (13, 0), 80 << 30))
    monkeypatch.setattr(loading, "require_torch_cuda", lambda: None)
    with pytest.raises(ConfigError, match=named):
        load_runner(EngineConfig(str(latent), **fields))


def test_drafts_for_a_model_with_state_are_refused_by_name(hybrid: Path) -> None:
    engine = EngineSpec(model=str(hybrid))
    target = load(hybrid)
    assert make_drafter("none", engine, target, 64) is None
    for names in ("prompt_lookup", "auto+suffix"):
        with pytest.raises(ConfigError, match=f"speculation {names.removeprefix('auto+')}: .* recurrent state"):
            make_drafter(names, engine, target, 64)


def test_auto_asks_for_no_drafts_where_none_can_be_taken(hybrid: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "baton.engine"):
        assert make_drafter("auto", EngineSpec(model=str(hybrid)), load(hybrid), 64) is None
    assert "speculation auto: no drafts of its own, because the model keeps recurrent state" in caplog.text


def test_a_step_without_pages_for_its_state_is_refused(hybrid: Path) -> None:
    engine = load(hybrid)
    engine.bind(memoryview(bytearray(4 * engine.spec.layout.page_bytes)), 4)
    with pytest.raises(BatonError, match="recurrent state"):
        engine.run(StepPlan((SequenceStep(1, [5], 0, [0]),)))
