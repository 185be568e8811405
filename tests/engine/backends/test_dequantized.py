"""Packed weights as torch's own products take them on a card without our kernels; the card is the CPU here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.backends.torch.dequantized import for_torch
from baton.engine.backends.torch.runner import TorchRunner
from baton.engine.checkpoints.weights import load_weights
from baton.engine.config import EngineConfig
from baton.engine.models import program_for
from baton.engine.plan import ModelSpec
from baton.engine.program.config import ModelConfig
from baton.kernels.linear.packed import PackedWeight
from baton.kv.layout.page import layout_for
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver

ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
PROMPTS = [[5, 17, 90, 3, 44, 61, 7], [int(i * 7 % 199) for i in range(19)]]
ASKED = Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0)


@pytest.mark.parametrize(("kind", "quantization", "off"), [("llama2", "int4", 0.12), ("mixtral", "int8", 0.01)])
def test_a_quantized_model_answers_by_plain_products(
    tmp_path: Path, kind: str, quantization: str, off: float
) -> None:
    directory = make(tmp_path / "model", kind, **ONE_LAYER)
    model = ModelConfig.read(directory)
    config = EngineConfig(str(directory), device="cuda", quantization=quantization, cache_dir=str(tmp_path))
    program, packed, *_ = load_weights(config, directory, model, program_for(model), torch.float32)
    plain = for_torch(program, packed, torch.float32, "cpu")
    exact = load_weights(EngineConfig(str(directory)), directory, model, program_for(model), torch.float32).weights
    for name, weight in exact.items():
        assert float((plain[name] - weight).norm() / weight.norm()) <= off, name
    assert any(isinstance(weight, PackedWeight) for weight in packed.values())
    spec, read = ModelSpec("", layout_for("float32", program.groups), 512, program.vocab_size, ()), []
    for weights in (packed, plain):
        driver = Driver(TorchRunner(spec, program, weights), pages=8)
        driver.answer(PROMPTS, ASKED)
        read.append(torch.tensor([one.chosen.logprob for key in (0, 1) for one in driver.read[key][0]]))
    assert float((read[0] - read[1]).abs().mean()) < 0.3  # beside packed weights, rows are rounded too
