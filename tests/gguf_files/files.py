"""GGUF files of the demo model as llama.cpp's converter writes them: sizes, text and tensors in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file
from tokenizers import Tokenizer

import baton
from baton.engine.quant.gguf import gguf_name

DEMO = Path(baton.__file__).resolve().parents[1] / "models" / "demo"
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
}


def header_of(path: Path, architecture: str = "llama", **fields: Any) -> Path:
    """A file without tensors; ``fields`` by GGUF's names, dots as two underscores."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        add(writer, name.replace("__", "."), value)
    return closed(writer, path)


def add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)


def closed(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text_fields(tokenizer: Tokenizer, pre: str, special: dict[str, int], **more: Any) -> dict[str, Any]:
    """A byte-level tokenizer as header fields; ``special`` has bos, eos, …"""
    model = json.loads(tokenizer.to_str())["model"]
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    control = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [word for word, _ in words],
        "tokenizer.ggml.token_type": [3 if number in control else 1 for _, number in words],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    }
    return fields | {f"tokenizer.ggml.{name}_token_id": number for name, number in special.items()} | more


def demo(path: Path, **split: Any) -> Path:
    """The whole demo model, its weights in bfloat16; ``split`` are the writer's settings of parts."""
    config = json.loads((DEMO / "config.json").read_text())
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama", **split)
    for field, name in SIZES.items():
        writer.add_uint32(f"llama.{field}", config[name])
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32("llama.rope.freq_base", config["rope_theta"])
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    text = text_fields(tokenizer, "smollm", {"bos": 0, "eos": 1}, **{"tokenizer.ggml.add_bos_token": True})
    for name, value in (text | {"tokenizer.chat_template": settings["chat_template"]}).items():
        add(writer, name, value)
    for name, tensor in load_file(DEMO / "model.safetensors").items():
        value = tensor.float().numpy()
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(
            name.split(".")[-2]
        )
        if heads:
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), value)
            continue
        coded = (value.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(value.shape[0], -1)
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(coded), raw_dtype=kind)
    return closed(writer, path)
