"""A Llama of random weights in Hugging Face layout, bf16, which Baton and vLLM serve alike.

Knows nothing of measuring. The vocabulary is the one of random_gguf.py; the tokenizer lies beside the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from baton.bench.engine.models import SIZES
from baton.quantize.run import quantize
from baton.quantize.schemes import Recipe
from baton.quantize.source import Source
from bench.peers.random_gguf import DEVIATION, SPECIAL, write_beside

NAME = "model.safetensors"


def checkpoint_of(home: Path, size: str) -> Path:
    """Returns the folder of ``size``, a key of bench.engine.models.SIZES; writes it where it isn't there yet."""
    folder = home / f"{size}-checkpoint"
    if not (folder / NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_beside(folder, SIZES[size])
        _complete(folder)
        generator = torch.Generator().manual_seed(0)
        tensors = {name: _tensor(shape, generator) for name, shape in _shapes(SIZES[size])}
        partial = folder / f"{NAME}.partial"
        save_file(tensors, str(partial), metadata={"format": "pt"})
        partial.rename(folder / NAME)
    return folder


def nf4_of(home: Path, size: str) -> Path:
    """Writes the same in NF4, as `baton quantize --method nf4` writes it and bitsandbytes reads it."""
    folder = home / f"{size}-nf4"
    if not (folder / "config.json").exists():
        quantize(Source(str(checkpoint_of(home, size))), Recipe(method="nf4").checked(), (), folder)
    return folder


def _complete(folder: Path) -> None:
    """Writes the files that transformers' classes want beside config.json and tokenizer.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def _tensor(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * DEVIATION).to(torch.bfloat16)


def _shapes(fields: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, vocab = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    kv = hidden // fields["num_attention_heads"] * fields["num_key_value_heads"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    for layer in range(fields["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        yield f"{base}.input_layernorm.weight", (hidden,)
        yield f"{base}.post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{base}.self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{base}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{base}.mlp.up_proj.weight", (inner, hidden)
        yield f"{base}.mlp.down_proj.weight", (hidden, inner)
