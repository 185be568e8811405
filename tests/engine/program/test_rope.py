"""Rotary tables against transformers', bit by bit, for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.engine.program import rope
from baton.engine.program.program import Rope
from baton.protos.errors import CheckpointError

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
KINDS = [
    ("default", {}),
    ("linear", {"factor": 2.5}),
    ("dynamic", {"factor": 2.0}),
    ("llama3", LLAMA3),
    ("yarn", YARN),
    ("yarn", YARN | {"attention_factor": 1.25, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}),
    ("yarn", YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}),
]


@pytest.mark.parametrize(("kind", "parameters"), KINDS)
@pytest.mark.parametrize("width", [24, 80, 128])
def test_tables_are_those_of_transformers(kind: str, parameters: dict[str, Any], width: int) -> None:
    theirs = LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": kind, "rope_theta": 500000.0, **parameters},
    )
    positions = torch.arange(1000)
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    ours = Rope(kind, 500000.0, {key: float(value) for key, value in parameters.items()})
    found = rope.tables(positions, *rope.frequencies(ours, width, 1024), torch.float32)
    half = width // 2
    torch.testing.assert_close(found[0][:, 0], cos[0], atol=1e-7, rtol=0)
    torch.testing.assert_close(found[1][:, 0, half:], sin[0, :, half:], atol=1e-7, rtol=0)
    assert torch.equal(found[1][:, 0, :half], -found[1][:, 0, half:])


@pytest.mark.parametrize(
    ("kind", "theta", "parameters", "named"),
    [
        ("default", -1e4, {}, "rope_theta is -10000"),
        ("linear", 1e4, {"factor": 0.0}, "factor is 0"),
        ("yarn", 1e4, YARN | {"original_max_position_embeddings": 0.0}, "original_max_position_embeddings is 0"),
        ("yarn", 1.0, YARN, "rope type 'yarn' can't be computed"),
        ("yarn", 1e4, {}, "rope type 'yarn' needs factor"),
    ],
)
def test_numbers_that_give_no_frequencies_are_refused_by_name(
    kind: str, theta: float, parameters: dict[str, float], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        rope.frequencies(Rope(kind, theta, parameters), 64, 1024)
