"""bitsandbytes checkpoints of which every linear layer is rounded to 4 bits, those of a few inputs included."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.quant.bitsandbytes import STATE
from tests.conformance.checkpoints import make
from tests.engine.quant.test_original_libraries import loaded

BLOCK = 64
TABLE = torch.linspace(-1, 1, 16)
SIZES = {
    "head_dim": 32,
    "intermediate_size": 96,
    "laurel_rank": 8,
    "hidden_size_per_layer_input": 32,
}


def rounded(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns bitsandbytes' tensors of a weight, and the values that they stand for."""
    count, flat = weight.numel(), weight.flatten().float()
    blocks = torch.nn.functional.pad(flat, (0, -count % BLOCK)).view(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    codes = (blocks / absmax[:, None])[..., None].sub(TABLE).abs().argmin(-1)
    values = (TABLE[codes] * absmax[:, None]).flatten()[:count].view(weight.shape)
    pairs = torch.nn.functional.pad(codes.flatten()[:count], (0, count % 2)).view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(weight.shape)}
    return {
        name: (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8),
        f"{name}.absmax": absmax,
        f"{name}.quant_map": TABLE.clone(),
        f"{name}.{STATE}nf4": torch.tensor(list(msgspec.json.encode(state)), dtype=torch.uint8),
    }, values


@pytest.mark.parametrize("streams", [3, 4])
def test_rows_shorter_than_any_group_keep_their_values(tmp_path: Path, streams: int) -> None:
    directory = make(tmp_path / "model", "gemma3n", altup_num_inputs=streams, **SIZES)
    file, found = directory / "model.safetensors", dict[str, Tensor]()
    values = dict[str, Tensor]()
    for name, weight in load_file(file).items():
        own, values[name] = (
            ({name: weight}, weight) if "embed" in name or weight.dim() < 2 else rounded(name, weight)
        )
        found |= own
    save_file(found, file)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(config))
    weights = loaded(directory, tmp_path / "cache").weights
    at = "model.layers.1"
    for ours, theirs in (("predict", "prediction_coefs"), ("correct", "correction_coefs")):
        assert torch.equal(weights[f"1.{ours}"], values[f"{at}.altup.{theirs}.weight"])
    wide = weights["1.widen"].dequantized()
    assert torch.equal(wide, values[f"{at}.laurel.linear_right.weight"].bfloat16().float())
