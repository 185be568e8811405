"""Tests models with experts: every op against its reference, the bits of a row, quantization, configs that are
off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.backends.cuda.load import wide_experts
from baton.engine.backends.work import work_of
from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.checkpoints.weights import load_weights
from baton.engine.config import EngineConfig
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import Linear, SwiGlu
from baton.kernels.abi import native
from baton.kernels.linear.packed import PackedWeight, one_of
from baton.protos.errors import CheckpointError
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import prompts
from tests.engine.small_models import load, model, require_the_references_tokens, require_the_same_bits
from tests.thorough import later

GREEDY = Sampling(temperature=0.0, max_tokens=8, logprobs=1)
needs_native = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


def asked(count: int = 5) -> list[list[int]]:
    return [prompt[:150] for prompt in prompts(1024, count=count, seed=5)]


@needs_native
@pytest.mark.parametrize("fields", [{"quantization": "int4"}, later({}), later({"dtype": "bfloat16"})], ids=str)
def test_an_answer_has_the_same_bits_alone_batched_and_op_by_op(
    home: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model(home, "mixtral")
    require_the_same_bits(lambda: load(directory, home, 2, **fields), asked(), GREEDY, (64, 97), monkeypatch)


@needs_native
def test_the_reference_gives_the_same_tokens(home: Path) -> None:
    directory = model(home, "qwen3_moe")
    require_the_references_tokens(directory, load(directory, home, 2), asked(), GREEDY)


def test_experts_are_in_the_layers_that_the_config_says(home: Path) -> None:
    mixed = program_for(ModelConfig.read(model(home, "qwen3_moe")))
    assert [op.gate_up for op in mixed.experts] == ["1.experts_gate_up", "2.experts_gate_up"]
    assert sum(isinstance(op, SwiGlu) for op in mixed.ops) == 1
    assert mixed.routers == {"1.router", "2.router"}
    stepped = program_for(ModelConfig.read(model(home, "qwen3_moe_norm")))
    assert [(op.gate_up, op.renormalise) for op in stepped.experts] == [("1.experts_gate_up", True)]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_quantization_rounds_experts_and_leaves_routers(home: Path, kind: str) -> None:
    directory = model(home, kind)
    config, fields = (
        EngineConfig(str(directory), quantization="int8", cache_dir=str(home)),
        ModelConfig.read(directory),
    )
    program, weights, *_ = load_weights(config, directory, fields, program_for(fields), torch.float32)
    plain = dict(Checkpoint(directory).weights(program_for(fields).weights, torch.float32, "cpu"))
    for op in program.experts:
        router = weights[op.gate_up.replace("experts_gate_up", "router")]
        assert isinstance(router, torch.Tensor)
        assert router.dtype == torch.float32
        for name in (op.gate_up, op.down):
            experts, wanted = weights[name], plain[name].unflatten(0, (op.experts, -1))
            assert isinstance(experts, PackedWeight)
            last = one_of(experts, op.experts - 1, op.experts, wanted.shape[1]).dequantized()
            assert float((last - wanted[-1]).norm() / wanted[-1].norm()) < 0.01
    packed = {op.weight for op in program.ops if isinstance(op, Linear)} - program.routers
    assert all(isinstance(weights[name], PackedWeight) for name in packed)


@needs_native
def test_a_token_costs_its_own_experts(home: Path) -> None:
    directory = model(home, "mixtral")
    program, layout = program_for(ModelConfig.read(directory)), load(directory, home).spec.layout
    weights = dict(Checkpoint(directory).weights(program.weights, torch.float32, "cpu"))
    work, elements = work_of(program, weights, layout, "cpu"), 3 * 72 * 128
    linears = sum(weights[op.weight].numel() for op in program.ops if isinstance(op, Linear))
    assert work.token_flops == 2.0 * linears + 2 * 2 * 2.0 * elements
    assert work.step_bytes == 4.0 * (linears + weights["head"].numel() + 2 * 2 * elements)


def test_a_gpu_takes_experts_of_bf16_alone(home: Path) -> None:
    directory = model(home, "mixtral")
    program = program_for(ModelConfig.read(directory))
    for dtype, said in ((torch.float32, "experts on a GPU are bf16, and these are not"), (torch.bfloat16, "")):
        weights = dict(Checkpoint(directory).weights(program.weights, dtype, "cpu"))
        assert wide_experts(program, weights) == said


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6; 5 at most"),
        ({"num_local_experts": 600}, "512 at most"),
        ({"num_local_experts": None}, "num_local_experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
    ],
    ids=str,
)
def test_a_config_that_is_off_names_the_field(
    home: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    fields = json.loads((model(home, "mixtral") / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=text):
        program_for(ModelConfig.read(tmp_path))
