"""Further rows of weights, as ranks read them for copies of experts: what comes, and how much is read for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.checkpoints.weights import load_weights
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.models import program_for
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import Route
from baton.kernels.linear.packed import PackedWeight
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_bias_by_which_experts_are_chosen_stays_float32(tmp_path: Path, quantization: str) -> None:
    """A bias of 8 in bfloat16 would be a multiple of 1/16, and scores lie between 0 and 1."""
    directory = make(tmp_path / "model", "glm4_moe_lite")
    path = next(directory.glob("*.safetensors"))
    stored = load_file(path)
    biases = {name: 8 + torch.rand_like(stored[name]) for name in stored if name.endswith("correction_bias")}
    save_file(stored | biases, path, {"format": "pt"})
    config = EngineConfig(
        str(directory), dtype="bfloat16", quantization=quantization, cache_dir=str(tmp_path / "cache")
    )
    model = ModelConfig.read(directory)
    program, weights, *_ = load_weights(config, directory, model, program_for(model), torch.bfloat16)
    found = [weights[op.bias] for op in program.ops if isinstance(op, Route) and op.bias]
    assert len(found) == len(biases) > 0
    for ours, theirs in zip(found, biases.values(), strict=True):
        assert torch.equal(ours, theirs.float())
    runner = load_runner(config)
    assert (
        len(Driver(runner, pages=40, chunk=32).answer([[1, 2, 3, 4]], Sampling(temperature=0.0, max_tokens=4))[0])
        == 4
    )


def test_of_unpacked_experts_beside_packed_weights_only_those_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(tmp_path / "model", "mixtral")
    overrides = {"*.experts.*": "none"}
    config = EngineConfig(
        str(directory), quantization="int8", quantization_overrides=overrides, cache_dir=str(tmp_path / "cache")
    )
    model = ModelConfig.read(directory)
    program, weights, _, rows_of = load_weights(config, directory, model, program_for(model), torch.float32)
    assert any(isinstance(weight, PackedWeight) for weight in weights.values())
    read: list[str] = []
    whole = Checkpoint.tensor

    def counted(self: Checkpoint, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        read.append(name)
        return whole(self, name, shape)

    monkeypatch.setattr(Checkpoint, "tensor", counted)
    layer = program.experts[0]
    for name, of_one in ((layer.gate_up, 2), (layer.down, 1)):
        wanted = weights[name]
        assert isinstance(wanted, Tensor)
        each, sources = len(wanted) // layer.experts, next(w.sources for w in program.weights if w.name == name)
        for expert in range(layer.experts):
            read.clear()
            found = rows_of(name, ((expert * each, (expert + 1) * each),))
            assert isinstance(found, Tensor)
            assert torch.equal(found, wanted[expert * each : (expert + 1) * each])
            assert read == list(sources[expert * of_one : (expert + 1) * of_one])
        read.clear()
        last = (layer.experts - 1) * each
        ranges = (1, each // 2 + 1), (last + 3, last + each)  # parts of two experts that aren't neighbours
        found = rows_of(name, ranges)
        assert isinstance(found, Tensor)
        assert torch.equal(found, torch.cat([wanted[begin:end] for begin, end in ranges]))
        assert len(read) < len(sources)
