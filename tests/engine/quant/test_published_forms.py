"""Names and settings of published checkpoints that no library at hand writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.quant import compressed_tensors, fp8
from baton.kernels.linear.integers import ScaledFloats
from baton.protos.errors import CheckpointError


class Held:
    """A checkpoint's tensors in memory."""

    def __init__(self, **tensors: Tensor) -> None:
        self._held = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def names(self) -> list[str]:
        return list(self._held)

    def tensor(self, name: str) -> Tensor:
        if name not in self._held:
            raise self.error(name, "is missing")
        return self._held[name]

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"tensor {name} {problem}", name)


def config(**settings: Any) -> ModelConfig:
    return ModelConfig(Path("config.json"), {"quantization_config": settings}, ())


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
def test_static_scales_of_fp8_activations_have_either_name(name: str) -> None:
    weight = torch.randn(4, 32).to(torch.float8_e4m3fn)
    scales = {"a__weight_scale_inv": torch.tensor(0.5), f"a__{name}": torch.tensor(0.25)}
    settings = config(quant_method="fp8", activation_scheme="static", weight_block_size=None)
    found = fp8.reader(settings, Held(a__weight=weight, **scales)).read("a.weight", (4, 32))
    assert isinstance(found, ScaledFloats)
    assert found.rows == 0.25


def test_weights_that_need_rotated_activations_are_refused_by_name() -> None:
    plain = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    compressed_tensors.reader(config(**plain, transform_config={}), Held())
    rotated = {"config_groups": {"R1": {"type": "hadamard", "apply": []}}}
    with pytest.raises(CheckpointError, match="has rotations of activations") as refused:
        compressed_tensors.reader(config(**plain, transform_config=rotated), Held())
    assert refused.value.param == "quantization_config.transform_config"
