"""Makes the GGUF files beside it by ggml's own quantizers: python make_gguf.py LIBGGML, a shared library of ggml's.

The one here was built from llama-cpp-python's source distribution: ggml.c, ggml-quants.c and ggml-threading.cpp
by gcc with -shared -fPIC, ggml-version.h filled in.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
from common import HERE, base, mixtral
from safetensors.torch import load_file

GGML_OF = "llama-cpp-python 0.3.36"
K_QUANTS = {
    "token_embd": "Q5_0",
    "output": "MXFP4",
    "attn_q": "Q4_K",
    "attn_k": "Q2_K",
    "attn_v": "Q3_K",
    "attn_output": "Q5_K",
    "ffn_gate": "IQ4_XS",
    "ffn_up": "IQ4_NL",
    "ffn_down": "Q6_K",
}
SMALL = {
    "token_embd": "Q8_0",
    "output": "Q8_0",
    "attn_q": "Q4_0",
    "attn_k": "Q4_0",
    "attn_v": "Q4_0",
    "attn_output": "Q5_0",
    "ffn_gate_exps": "Q4_1",
    "ffn_up_exps": "Q4_1",
    "ffn_down_exps": "Q5_1",
}


def quantized(ggml: ctypes.CDLL, value: np.ndarray, kind: str) -> np.ndarray:
    """(rows, inputs) float32 as ggml's blocks, (rows, bytes of a row)."""
    number = gguf.GGMLQuantizationType[kind]
    items, size = gguf.GGML_QUANT_SIZES[number]
    rows, inputs = value.shape
    out = np.zeros((rows, inputs // items * size), np.uint8)
    source = np.ascontiguousarray(value, np.float32)
    sizes = ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(inputs)
    ggml.ggml_quantize_init(int(number))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointers = source.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p)
    written = ggml.ggml_quantize_chunk(int(number), *pointers, *sizes, None)
    assert written == out.nbytes
    return out


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of q or k in the order of llama.cpp's converter."""
    rows, inputs = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def tensors(plain: Path, config: dict[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF's names and values, experts stacked."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in sorted(load_file(plain / "model.safetensors").items()):
        value = tensor.float().numpy()
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            spelled = names.get_name(f"{before}.experts.{after.split('.')[1]}")
            experts.setdefault(f"{spelled}.weight", []).append(value)
            continue
        spelled = names.get_name(name, try_suffixes=(".weight",))
        count = heads.get(str(spelled).split(".")[-2])
        yield str(spelled), value if count is None else paired(value, count)
    for spelled, values in experts.items():
        yield spelled, np.stack(values)


def write(ggml: ctypes.CDLL, plain: Path, directory: Path, kinds: dict[str, str]) -> None:
    """One file, with the header that llama.cpp's converter would write, and config.json beside it."""
    directory.mkdir(exist_ok=True)
    config = json.loads((plain / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    writer = gguf.GGUFWriter(directory / "model.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    for name, value in tensors(plain, config):
        kind = kinds.get(name.split(".")[-2])
        if kind is None:
            writer.add_tensor(name, value)
            continue
        coded = quantized(ggml, value.reshape(-1, value.shape[-1]), kind)
        writer.add_tensor(name, coded.reshape(*value.shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {"ggml": GGML_OF} | {name: version(name) for name in ("gguf", "transformers")}
    (directory / "versions.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Writes both files."""
    ggml = ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 1}
    with tempfile.TemporaryDirectory() as made:
        write(ggml, base(Path(made) / "k", **sizes), HERE / "gguf_k_quants", K_QUANTS)
        write(ggml, mixtral(Path(made) / "m"), HERE / "gguf_experts", SMALL)


if __name__ == "__main__":
    main()
