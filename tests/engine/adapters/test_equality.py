"""A model with adapters beside it answers as one with them merged in, alone and in any company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from baton.engine.abilities import adapters_of
from baton.engine.adapters.reading import read_here
from baton.engine.backends import loading
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.backends.torch.runner import TorchRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner, SampleSpec, SequenceStep, StepPlan
from baton.engine.program.sites import sites_of
from baton.kernels.abi import native
from baton.protos.channel import AdapterPlace
from baton.protos.errors import AdapterNotLoaded, AdapterRefused, ConfigError
from baton.protos.nouns import AdapterLimits, Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.conformance.kinds import KINDS
from tests.conformance.small_kinds import SMALL
from tests.engine.adapters.adapter_files import ATTENTION, EVERYWHERE, EXPERTS, HEAD, MIXTRAL, merge, write
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

SAMPLES = Path(__file__).parents[2] / "data" / "adapters"
LIMITS = AdapterLimits(16, 1 << 30, 256)
SPOKEN = Sampling(temperature=0.0, max_tokens=8, logprobs=1)
HEADS_WITH_BIASES = ("phimoe", "starcoder2")
PROMPTS = [[5, 6, 7, 8, 9] * 7, [3, 4], [11, 12, 13] * 6]


def load(model: Path, **fields: Any) -> Runner:
    return load_runner(EngineConfig(str(model), threads=2, adapters=LIMITS, **fields))


def hold(runner: Runner, name: str, directory: Path) -> str:
    host = adapters_of(runner)
    assert host is not None
    found = read_here(AdapterPlace(name, str(directory)), host.base)
    host.hold(found.info.id, found.packed)
    return found.info.id


def answers(runner: Runner, adapters: list[str], prompts: list[list[int]] = PROMPTS, **how: Any) -> list[Any]:
    """Tokens and their likelihoods."""
    driver = Driver(runner, pages=60, **how)
    tokens = driver.answer(prompts, SPOKEN, adapters=adapters)
    return [(found, [one.chosen.logprob for one in driver.logprobs[key]]) for key, found in enumerate(tokens)]


def close(found: list[Any], wanted: list[Any]) -> bool:
    """The same tokens, logprobs within the issue's bound in float32."""
    return all(
        mine == theirs and max(abs(a - b) for a, b in zip(ours, merged, strict=True)) <= 1e-4
        for (mine, ours), (theirs, merged) in zip(found, wanted, strict=True)
    )


def merged_and_beside(root: Path, kind: str, **settings: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Answers of the merged model, of the one with an adapter everywhere, and of the base alone."""
    model = make(root / "model", kind)
    targets = tuple(name for name in EVERYWHERE if name != HEAD or kind not in HEADS_WITH_BIASES)
    adapter = write(root / "adapter", model, (*targets, "c_fc", "c_proj", EXPERTS, *MIXTRAL), **settings)
    runner = load(model)
    name = hold(runner, "a", adapter)
    merged = load_runner(EngineConfig(str(merge(root / "merged", model, adapter)), threads=2))
    return answers(merged, []), answers(runner, [name] * 3), answers(runner, [])


def test_an_adapter_of_a_head_whose_norm_has_a_bias_is_refused_by_name(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "starcoder2")
    runner, adapter = load(model), write(tmp_path / "adapter", model, (*ATTENTION, HEAD))
    with pytest.raises(AdapterRefused, match="lm_head"):
        hold(runner, "a", adapter)


@pytest.mark.parametrize("kind", ["llama2", "qwen3", "mixtral", *first_now(sorted({**KINDS, **SMALL}), 0)])
def test_it_answers_as_the_merged_model(tmp_path: Path, kind: str) -> None:
    merged, beside, base = merged_and_beside(tmp_path, kind)
    assert close(beside, merged)
    assert [tokens for tokens, _ in base] != [tokens for tokens, _ in merged]


def test_ranks_that_differ_by_layer_and_rank_stabilised_scales(tmp_path: Path) -> None:
    merged, beside, _ = merged_and_beside(tmp_path, "qwen2", rank=5, alpha=3.0, use_rslora=True)
    assert close(beside, merged)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, and two adapters of other ranks beside other layers."""
    root = tmp_path_factory.mktemp("two")
    model = make(root / "model", "qwen2_mixed")
    few = write(root / "few", model, ("q_proj", "v_proj"), rank=4, seed=2)
    return model, few, write(root / "many", model, EVERYWHERE, rank=16, seed=3)


KINDS_OF_WEIGHTS = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}]


@pytest.mark.parametrize("kind", first_now(KINDS_OF_WEIGHTS, 1), ids=str)
def test_company_changes_no_bit(two: tuple[Path, Path, Path], tmp_path: Path, kind: dict[str, str]) -> None:
    model, few, many = two
    runner = load(model, cache_dir=str(tmp_path), **kind)
    adapters = [hold(runner, "few", few), "", hold(runner, "many", many), "", hold(runner, "few", few)]
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[1]]
    together = answers(runner, adapters, prompts, chunk=16)
    for key in (0, 1, 2, 4):
        assert answers(runner, [adapters[key]], [prompts[key]]) == [together[key]]
    assert together[0] != answers(runner, [], [prompts[0]])[0]


def test_rows_without_an_adapter_have_the_bits_of_a_model_without_places_for_any(
    two: tuple[Path, Path, Path],
) -> None:
    model, few, _ = two
    plain, runner = load_runner(EngineConfig(str(model), threads=2)), load(model)
    beside = answers(runner, ["", hold(runner, "few", few), ""])
    assert [beside[0], beside[2]] == [answers(plain, [])[0], answers(plain, [])[2]]


@pytest.mark.parametrize("kind", first_now([{"quantization": "int8"}, {"quantization": "int4"}], 1), ids=str)
def test_beside_quantized_weights_the_same_product_is_added(
    two: tuple[Path, Path, Path], tmp_path: Path, kind: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op of the step, the adapters' among them, agrees with its reference over the same weights."""
    monkeypatch.setenv("BATON_CHECK_STEP", "1")
    model, few, many = two
    runner = load(model, cache_dir=str(tmp_path), **kind)
    assert isinstance(runner, NativeRunner)
    answers(runner, [hold(runner, "few", few), hold(runner, "many", many), ""])


def test_torchs_ops_answer_alike(two: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, few, many = two
    runner = load(model)
    native_answers = answers(runner, [hold(runner, "few", few), hold(runner, "many", many), ""])
    monkeypatch.setattr(native, "library", lambda: None)
    other = load_runner(EngineConfig(str(model), adapters=LIMITS))
    assert isinstance(other, TorchRunner)
    assert close(answers(other, [hold(other, "few", few), hold(other, "many", many), ""]), native_answers)


def test_prompts_are_scored_and_pooled_on_their_adapter(two: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, _, many = two
    runner = load(model)
    merged = load_runner(EngineConfig(str(merge(tmp_path, model, many)), threads=2))
    asked, read = Sampling(max_tokens=1, prompt_logprobs=1, pooling="mean"), []
    for engine, adapters in ((runner, [hold(runner, "many", many)]), (merged, [])):
        driver = Driver(engine, pages=20, chunk=16)
        driver.answer(PROMPTS[:1], asked, adapters=adapters)
        scores, pooled = driver.read[0]
        vector = torch.frombuffer(bytearray(pooled), dtype=torch.float32)
        read.append((torch.tensor([one.chosen.logprob for one in scores]), vector))
    for found, wanted in zip(*read, strict=True):
        assert float((found - wanted).abs().max()) <= 1e-4


def test_drafted_rows_are_on_their_sequences_adapter(two: tuple[Path, Path, Path]) -> None:
    """Rows that verify drafts choose what a step each would have chosen."""
    model, _, many = two
    runner = load(model)
    name = hold(runner, "many", many)
    (tokens, _), *_ = answers(runner, [name], PROMPTS[:1])
    driver = Driver(runner, pages=20)
    driver.answer(PROMPTS[:1], Sampling(max_tokens=1), adapters=[name])
    spec = SampleSpec(Sampling(temperature=0.0), 0, 40, (), 35)
    prompt, pages = [*PROMPTS[0], tokens[0]], list(range(8))
    runner.run(StepPlan((SequenceStep(1, prompt[:-1], 0, pages, adapter=name),)))
    step = SequenceStep(1, [prompt[-1], *tokens[1:4]], 35, pages, spec, verify=(spec,) * 3, adapter=name)
    assert [one.token_id for one in runner.run(StepPlan((step,))).sampled] == tokens[1:5]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_that_was_trained_inside_a_larger_model_adds_the_same(tmp_path: Path, prefix: str) -> None:
    """Its names have another prefix, and some of its matrices, those of K and V that no layer reads, no effect."""
    model, at = make(tmp_path / "model", "gemma3n"), "base_model.model."

    def renamed(name: str) -> str:
        return name.replace(f"{at}model.", f"{at}{prefix}").replace(f"{at}lm_head", f"{at}language_model.lm_head")

    def inside(tensors: dict[str, torch.Tensor]) -> None:
        found = {renamed(name): tensor for name, tensor in tensors.items()}
        for name, tensor in tuple(found.items()):
            if "layers.3." in name and "q_proj" in name:
                found |= {name.replace("q_proj", other): tensor.clone() for other in ("k_proj", "v_proj")}
        tensors.clear()
        tensors.update(found)

    targets, pattern = ("q_proj", "gate_proj", "linear_left", "embed_tokens", HEAD), "layers.1.self_attn.q_proj"
    plain = write(tmp_path / "plain", model, targets, alpha_pattern={f"model.{pattern}": 3})
    other = write(tmp_path / "inside", model, targets, change=inside, alpha_pattern={f"{prefix}{pattern}": 3})
    runner = load(model)
    wanted, found = (answers(runner, [hold(runner, at.name, at)] * 3) for at in (plain, other))
    assert found == wanted
    assert found != answers(runner, [])


TRANSFORMERS_NAMES = {
    "nemotron_h": ("backbone.", "model.", "layers.1.mixer.up_proj"),
    "mixtral": ("block_sparse_moe.gate", "mlp.gate", "layers.1.mlp.gate"),
    "phimoe": ("block_sparse_moe.gate", "mlp.router", "layers.1.mlp.router"),
    "granite_hybrid": ("router.layer", "router", "layers.1.block_sparse_moe.router"),
}


@pytest.mark.parametrize("kind", first_now(list(TRANSFORMERS_NAMES), 2))
def test_an_adapter_with_the_names_that_transformers_gives_modules_adds_the_same(tmp_path: Path, kind: str) -> None:
    """PEFT saves the names of modules in memory, which in transformers 5 aren't all those of the checkpoint."""
    part, module, pattern = TRANSFORMERS_NAMES[kind]
    model = make(tmp_path / "model", kind)

    def renamed(tensors: dict[str, torch.Tensor]) -> None:
        found = {name.replace(part, module): tensor for name, tensor in tensors.items()}
        assert found.keys() != tensors.keys()
        tensors.clear()
        tensors.update(found)

    targets = tuple(name for name in EVERYWHERE if name != HEAD)
    checkpoints_own = pattern.replace(module, part)
    plain = write(tmp_path / "plain", model, targets, alpha_pattern={checkpoints_own: 3})
    other = write(tmp_path / "renamed", model, targets, change=renamed, alpha_pattern={pattern: 3})
    runner = load(model)
    wanted, found = (answers(runner, [hold(runner, at.name, at)] * 3) for at in (plain, other))
    assert found == wanted
    assert found != answers(runner, [])


def test_parameters_of_experts_that_take_no_adapter_are_refused_as_such(tmp_path: Path) -> None:
    model, at = make(tmp_path / "model", "granite_hybrid"), "base_model.model.model.layers.0.block_sparse_moe"

    def experts(tensors: dict[str, torch.Tensor]) -> None:
        pair = {f"{at}.experts.lora_{half}.weight": torch.ones(8, 8) for half in "AB"}
        tensors.update(pair)

    adapter = write(tmp_path / "adapter", model, ATTENTION, change=experts)
    with pytest.raises(AdapterRefused, match=r"beside parameters of model\.layers\.0.*leave out target_parameters"):
        hold(load(model), "a", adapter)


def test_an_adapter_beside_mixes_of_streams_is_refused_by_name(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "gemma3n")
    runner, adapter = load(model), write(tmp_path / "adapter", model, (*ATTENTION, "modality_router"))
    with pytest.raises(AdapterRefused, match=r"0\.altup\.modality_router, where adapters aren't applied"):
        hold(runner, "a", adapter)


@pytest.mark.parametrize("sample", ["plain", "spread"])
def test_what_peft_saved_answers_as_in_peft(sample: str) -> None:
    """The samples are PEFT's own files: rank-stabilised, with patterns, and with copies of the tables of embedding
    and head.
    """
    said = json.loads((SAMPLES / "answers.json").read_text())
    runner = load(SAMPLES / "base")
    name = hold(runner, "a", SAMPLES / sample)
    driver = Driver(runner, pages=8)
    asked = Sampling(max_tokens=1, prompt_logprobs=0)
    driver.answer(said["tokens"], asked, adapters=[name] * 2)
    for key, wanted in enumerate(said["logprobs"][sample]):
        found = [one.chosen.logprob for one in driver.read[key][0]]
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= 1e-4


@pytest.mark.parametrize(
    ("model", "adapter"), [("gpt_oss", "adapter"), ("qwen3_moe", "adapter"), ("qwen3_moe", "crossed")]
)
def test_what_peft_saved_of_parameters_of_all_experts_answers_as_in_peft(model: str, adapter: str) -> None:
    """Gates and ups in turn or one after the other, matrices of either orientation, square ones among them."""
    at = SAMPLES / "stacked" / model
    said = json.loads((at / ("crossed.json" if adapter == "crossed" else "answers.json")).read_text())
    runner = load(at / "base")
    name = hold(runner, "a", at / adapter)
    driver = Driver(runner, pages=8)
    driver.answer(said["tokens"], Sampling(max_tokens=1, prompt_logprobs=0), adapters=[name] * 2)
    for key, wanted in enumerate(said["logprobs"]):
        found = [one.chosen.logprob for one in driver.read[key][0]]
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= 1e-4


def test_an_adapter_that_is_not_held_fails_its_sequence_by_name(two: tuple[Path, Path, Path]) -> None:
    runner = load(two[0])
    Driver(runner, pages=20)
    with pytest.raises(AdapterNotLoaded, match="gone@"):
        runner.run(StepPlan((SequenceStep(1, [1, 2], 0, [0], adapter="gone@0123456789abcdef"),)))


def test_a_gpu_without_the_engines_kernels_refuses_adapters(
    two: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CUDA_SIMT", "1")
    monkeypatch.setattr(loading, "kernels_or_none", lambda: None)
    with pytest.raises(ConfigError, match=r"torch's ops, .* apply no adapters; serve the base model") as refused:
        load_runner(EngineConfig(str(two[0]), device="cuda", adapters=LIMITS))
    assert refused.value.param == "worker.adapters"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama2", "qwen3", "mixtral"])
def test_on_the_shim_it_answers_as_the_merged_model_does_there(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA step from a checkpoint and PEFT's files, experts' among them. bf16 products round, so likelihoods
    differ from the merged model's by that, and hardly from those of a CPU on the adapter.
    """
    monkeypatch.setenv("BATON_CUDA_SIMT", "1")
    model = make(tmp_path / "model", kind)
    layers = tuple(name for name in EVERYWHERE if name != "lm_head")
    adapter = write(tmp_path / "adapter", model, (*layers, EXPERTS, *MIXTRAL))
    merged = merge(tmp_path / "merged", model, adapter)
    runner, cpu = (load(model, device=on, dtype="bfloat16", kv_cache_dtype="bf16") for on in ("cuda", "cpu"))
    name = hold(runner, "a", adapter)
    assert hold(cpu, "a", adapter) == name
    there = load_runner(EngineConfig(str(merged), device="cuda", dtype="bfloat16", kv_cache_dtype="bf16"))
    asked = Sampling(max_tokens=1, prompt_logprobs=0)
    read = []
    for engine, adapters in ((runner, [name]), (there, []), (runner, []), (cpu, [name])):
        driver = Driver(engine, pages=20)
        driver.answer(PROMPTS[:1], asked, adapters=adapters)
        read.append([one.chosen.logprob for one in driver.read[0][0]])
    beside, wanted, base, on_cpu = (torch.tensor(one) for one in read)
    assert float((beside - on_cpu).abs().mean()) <= 0.02
    assert float((beside - wanted).abs().mean()) <= 0.15
    assert float((base - wanted).abs().mean()) > 5 * float((beside - wanted).abs().mean())


def test_a_head_without_a_site_refuses_its_adapter_by_name(two: tuple[Path, Path, Path]) -> None:
    host = adapters_of(load(two[0]))
    assert host is not None
    assert HEAD in host.base.sites
    sites = {module: site for module, site in host.base.sites.items() if module != HEAD}
    with pytest.raises(AdapterRefused, match=r"lm_head.*stands beside the head, where adapters aren't applied"):
        read_here(AdapterPlace("many", str(two[2])), msgspec.structs.replace(host.base, sites=sites))


@pytest.mark.parametrize("kind", ["llama2", "mixtral", "qwen3_moe"])
def test_sites_are_the_checkpoints_modules(tmp_path: Path, kind: str) -> None:
    runner = load(make(tmp_path, kind))
    assert isinstance(runner, NativeRunner)
    sites = sites_of(runner._program.program)
    last = {name.rpartition(".")[2] for name in sites}
    assert {*ATTENTION, "embed_tokens", "lm_head"} <= last
    assert {"mixtral": {*MIXTRAL}, "llama2": set()}.get(kind, {"gate_proj", "up_proj", "down_proj"}) == {
        name.rpartition(".")[2] for name in sites if EXPERTS in name
    }
    assert ("gate" in last) == (kind != "llama2")
    assert sorted({site.number for site in sites.values()}) == list(range(len({s.number for s in sites.values()})))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model with experts, an adapter beside these, and one beside attention alone."""
    root = tmp_path_factory.mktemp("experts")
    model = make(root / "model", "qwen3_moe")
    deep = write(root / "deep", model, ("gate_proj", "up_proj", "down_proj", EXPERTS), rank=4, seed=4)
    return model, deep, write(root / "attention", model, ATTENTION, rank=4, seed=5)


@pytest.mark.parametrize("kind", first_now(KINDS_OF_WEIGHTS, 1), ids=str)
def test_beside_experts_company_changes_no_bit(
    experts: tuple[Path, Path, Path], tmp_path: Path, kind: dict[str, str]
) -> None:
    model, deep, attention = experts
    runner = load(model, cache_dir=str(tmp_path), **kind)
    adapters = [hold(runner, "deep", deep), "", hold(runner, "attention", attention)]
    together = answers(runner, adapters, chunk=16)
    for key in range(3):
        assert answers(runner, [adapters[key]], [PROMPTS[key]]) == [together[key]]
    assert together[0] != answers(runner, [], [PROMPTS[0]])[0]


@pytest.mark.parametrize("kind", first_now([{"quantization": "int4"}, {"dtype": "bfloat16"}], 0), ids=str)
def test_beside_experts_of_any_weights_the_same_product_is_added(
    experts: tuple[Path, Path, Path], tmp_path: Path, kind: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CHECK_STEP", "1")
    model, deep, attention = experts
    runner = load(model, cache_dir=str(tmp_path), **kind)
    answers(runner, [hold(runner, "deep", deep), hold(runner, "attention", attention), ""])


@pytest.mark.thorough
def test_torchs_ops_apply_adapters_beside_experts_alike(
    experts: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, deep, _ = experts
    runner = load(model)
    native_answers = answers(runner, [hold(runner, "deep", deep), ""], PROMPTS[1:])
    monkeypatch.setattr(native, "library", lambda: None)
    other = load_runner(EngineConfig(str(model), adapters=LIMITS))
    assert close(answers(other, [hold(other, "deep", deep), ""], PROMPTS[1:]), native_answers)
