"""The unquantized checkpoint: what copying a tensor reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.checkpoints.safetensors import INDEX, SINGLE
from baton.quantize import source as own
from baton.quantize.source import Source


def test_a_tensor_is_copied_in_pieces_without_reading_the_index_again(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, places = load_file(source.directory / SINGLE), {}
    for place, (name, tensor) in enumerate(sorted(tensors.items())):
        places[name] = f"model-{place % 3}.safetensors"
        there = tmp_path / places[name]
        save_file((load_file(there) if there.exists() else {}) | {name: tensor}, there)
    (tmp_path / "config.json").write_bytes((source.directory / "config.json").read_bytes())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    sharded = Source(str(tmp_path))
    (tmp_path / INDEX).unlink()
    monkeypatch.setattr(own, "PIECE_BYTES", 256)
    for name in ("embed", "0.qkv"):
        for at, copied in sharded.copied(name).items():
            pieces = list(copied.pieces)
            assert len(pieces) > 1
            assert torch.equal(torch.cat(pieces), tensors[at])
