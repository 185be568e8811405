"""Tests quantized experts of models whose plain checkpoints hold all experts of a layer in one tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.checkpoints.weights import load_weights
from baton.engine.config import EngineConfig
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.stacked import own_source
from baton.kernels.linear.packed import E4M3_A16, PackedWeight, one_of
from baton.protos.errors import CheckpointError
from tests.conformance.checkpoints import make

FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("l.3.mlp.experts.gate_up_proj[7,even]", "l.3.mlp.experts.7.gate_proj.weight"),
        ("l.3.mlp.experts.gate_up_proj[7,odd]", "l.3.mlp.experts.7.up_proj.weight"),
        ("l.3.mlp.experts.down_proj_bias[12]", "l.3.mlp.experts.12.down_proj.bias"),
        ("l.3.feed_forward.experts.gate_up_proj[0,last]", "l.3.feed_forward.experts.0.up_proj.weight"),
        ("l.3.moe.input_linear.weight[1,first,rows]", "l.3.moe.experts.1.gate_proj.weight"),
        ("l.3.moe.output_linear.weight[1,rows]", "l.3.moe.experts.1.down_proj.weight"),
        ("l.3.mlp.experts.7.gate_proj.weight", None),
    ],
)
def test_an_expert_has_the_names_that_llm_compressor_gives_it(source: str, name: str | None) -> None:
    assert own_source(source) == name


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4", "granite_hybrid"])
def test_a_plain_checkpoint_with_a_tensor_per_expert_is_the_same_model(kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "plain", kind)
    program = program_for(ModelConfig.read(folder))
    files = Checkpoint(folder)
    expected = files.weights(program.weights, torch.float32, "cpu")
    apart: dict[str, Tensor] = {}
    for weight in program.weights:
        for source, shape in zip(weight.sources, weight.shapes, strict=False):  # constants have shapes alone
            apart[own_source(source) or source] = files.tensor(source, shape).contiguous().clone()
    save_file(apart, written(tmp_path / "apart", folder, {}))
    found = Checkpoint(tmp_path / "apart").weights(program.weights, torch.float32, "cpu")
    assert any(".experts.0." in name for name in apart)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def written(folder: Path, model: Path, settings: dict[str, object]) -> Path:
    """Makes ``folder`` with the config of ``model`` and ``settings``; returns where its tensors go."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder / "model.safetensors"


def coded(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A Granite hybrid whose experts' tensors are e4m3 with a scale per output, and what they stand for."""
    model = make(tmp_path / "plain", "granite_hybrid")
    tensors, values = load_file(model / "model.safetensors"), dict[str, Tensor]()
    for name in [name for name in tensors if "block_sparse_moe" in name and tensors[name].dim() == 3]:
        scale = tensors[name].abs().amax(-1, keepdim=True) / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"], values[name] = scale, tensors[name].float() * scale
    save_file(tensors, written(tmp_path / "fp8", model, {"quantization_config": FP8}))
    return tmp_path / "fp8", values


def loaded(folder: Path) -> dict[str, Tensor | PackedWeight]:
    read = ModelConfig.read(folder)
    config = EngineConfig(str(folder), cache_dir=str(folder / "cache"))
    return load_weights(config, folder, read, program_for(read), torch.float32).weights


def test_one_e4m3_tensor_of_all_experts_is_read_with_its_scales(tmp_path: Path) -> None:
    folder, values = coded(tmp_path)
    found = loaded(folder)
    assert values
    for name, every in values.items():
        part = "gate_up" if "input_linear" in name else "down"
        packed = found[f"{name.split('.')[2]}.experts_{part}"]
        assert isinstance(packed, PackedWeight)
        assert packed.kind == E4M3_A16
        for expert, wanted in enumerate(every):
            own = one_of(packed, expert, len(every), len(wanted)).dequantized()
            assert torch.allclose(own, wanted, rtol=1e-6)


def test_scales_of_fewer_experts_than_there_are_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = coded(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.output_linear.weight_scale"
    save_file(tensors | {name: tensors[name][:2].contiguous()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} has shape .*, not one of all experts'"):
        loaded(folder)
