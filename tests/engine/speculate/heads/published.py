"""Random heads in the files that Medusa and EAGLE-3 checkpoints are published as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

MEDUSA_HEADS, MEDUSA_LAYERS = 3, 2


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def medusa(directory: Path, hidden: int, vocab: int, names: str = "published") -> dict[str, Tensor]:
    """Writes heads by FasterDecoding's names, or by vLLM's; returns the tensors by the former."""
    tensors: dict[str, Tensor] = {}
    for head in range(MEDUSA_HEADS):
        for at in range(MEDUSA_LAYERS):
            tensors[f"{head}.{at}.linear.weight"] = drawn(97 * head + at, hidden, hidden)
            tensors[f"{head}.{at}.linear.bias"] = drawn(97 * head + at + 50, hidden)
        tensors[f"{head}.{MEDUSA_LAYERS}.weight"] = drawn(97 * head + 70, vocab, hidden)
    renamed = tensors if names == "published" else {_vllm(name): tensor for name, tensor in tensors.items()}
    config = {"medusa_num_heads": MEDUSA_HEADS, "medusa_num_layers": MEDUSA_LAYERS, "base_model_name_or_path": "x"}
    return _written(directory, "medusa_lm_head.safetensors", config, renamed, tensors)


def _vllm(name: str) -> str:
    head, at, *_ = name.split(".")
    end = name.rpartition(".")[2]
    return f"lm_heads.{head}.weight" if at == str(MEDUSA_LAYERS) else f"blocks.{head}.layers.{at}.{end}"


def eagle3(directory: Path, target: int, vocab: int, own_table: bool = False, **fields: Any) -> dict[str, Tensor]:
    """Writes a layer for a model of hidden size ``target``, as SpecForge publishes it; returns its tensors."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": vocab // 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        **fields,
    }
    hidden, inner, draft = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "fc.weight": (hidden, 3 * target),
        "lm_head.weight": (draft, hidden),
    }
    tensors = {name: 2.0 * drawn(at, *shape) for at, (name, shape) in enumerate(shapes.items())}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": 1.0 + 0.2 * drawn(40 + at, hidden) for at, name in enumerate(norms)}
    if own_table:
        tensors["embed_tokens.weight"] = drawn(90, vocab, hidden)
    ids = torch.arange(vocab)[::2][:draft]
    tensors["d2t"] = ids - torch.arange(draft)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).scatter(0, ids, True)
    return _written(directory, "model.safetensors", config, tensors, tensors)


def _written(
    directory: Path, file: str, config: dict[str, Any], tensors: dict[str, Tensor], given: dict[str, Tensor]
) -> dict[str, Tensor]:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(directory / file))
    return given
