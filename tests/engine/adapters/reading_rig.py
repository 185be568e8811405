"""A base model of a few matrices and an adapter of it, on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.reading import read_here
from baton.engine.adapters.table import ReadAdapter
from baton.engine.program.sites import Site
from baton.protos.channel import AdapterPlace
from tests.engine.adapters.adapter_files import write

Q, V, EMBED = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.embed_tokens"
SITES = {
    Q: Site(1, 0, 80, 48),
    V: Site(1, 112, 32, 48),
    EMBED: Site(0, 0, 48, 100, True),
    "lm_head": Site(2, 0, 100, 48),
}
BASE = AdapterBase(SITES, max_rank=16, max_bytes=1 << 20)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Enough of a checkpoint to know the modules' sizes by."""
    (tmp_path / "model").mkdir()
    shapes = {Q: (80, 48), V: (32, 48), EMBED: (100, 48)}
    tensors = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Path:
    return write(tmp_path / "adapter", model, ("q_proj", "v_proj", "embed_tokens", "lm_head"), rank=4)


def read(directory: Path, base: AdapterBase = BASE, **place: str) -> ReadAdapter:
    return read_here(AdapterPlace("sql", str(directory), **place), base)


def plain(found: ReadAdapter) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    of = found.packed
    return {(p.site.number, p.site.first): (of.first(p), of.plain_second(p)) for p in of.parts}
