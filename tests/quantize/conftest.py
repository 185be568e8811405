"""Tiny plain checkpoints with sizes that every group divides, and a text that they write themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton.quantize.source import Source
from tests.conformance.checkpoints import make

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MORE = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
Made = Callable[[str], Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint of a kind, made once."""
    found: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            found[kind] = make(folder, kind, tokenizer=True, **SIZES | HEADS | MORE.get(kind, {}))
        return found[kind]

    return get


@pytest.fixture(scope="session")
def model(made: Made) -> Path:
    """A model with biases on q, k and v, whose heads share K and V."""
    return made("qwen2")


@pytest.fixture(scope="session")
def source(model: Path) -> Source:
    return Source(str(model))


@pytest.fixture(scope="session")
def samples() -> list[list[int]]:
    """Draws eight samples of 32 token ids."""
    return torch.randint(0, 512, (8, 32), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products wait for a busy core longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
