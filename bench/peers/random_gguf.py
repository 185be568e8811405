"""A Llama of random weights as a GGUF file, which llama.cpp, OpenVINO GenAI, transformers and Baton all read.

Knows nothing of measuring. Of BLOCKS the very blocks are random, but for their scales: only ggml itself rounds to
them, and speed doesn't depend on what they say. Matrices are all of one type but the head and the embedding, which
are Q8_0 in a quantized file: ours keeps the head in int8 too. The vocabulary is made up (bytes and numbered words);
config.json and tokenizer.json lie beside the file, so that the folder can be served.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray

from baton.bench.engine.models import CONTEXT, SIZES

TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "int8": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "int4": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (gguf.GGMLQuantizationType.Q4_1, gguf.LlamaFileType.MOSTLY_Q4_1),
    "q4_k": (gguf.GGMLQuantizationType.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_M),
    "q5_k": (gguf.GGMLQuantizationType.Q5_K, gguf.LlamaFileType.MOSTLY_Q5_K_M),
    "q6_k": (gguf.GGMLQuantizationType.Q6_K, gguf.LlamaFileType.MOSTLY_Q6_K),
    "iq4_nl": (gguf.GGMLQuantizationType.IQ4_NL, gguf.LlamaFileType.MOSTLY_IQ4_NL),
    "iq4_xs": (gguf.GGMLQuantizationType.IQ4_XS, gguf.LlamaFileType.MOSTLY_IQ4_XS),
    "mxfp4": (gguf.GGMLQuantizationType.MXFP4, gguf.LlamaFileType.MOSTLY_MXFP4_MOE),
}
# Where a block's float16 scales lie: its first byte, how many.
BLOCKS = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208, 1), "iq4_nl": (0, 1), "iq4_xs": (0, 1)}
SCALE = 1e-3  # of a random block
NAME, EPS, THETA, DEVIATION = "model.gguf", 1e-6, 10000.0, 0.02
SPECIAL = ("<s>", "</s>")  # the vocabulary's last two
NORMAL, CONTROL = 1, 3  # gguf.TokenType


def folder_of(home: Path, size: str, scheme: str) -> Path:
    """Returns the folder of ``size`` (bench.engine.models.SIZES) in ``scheme`` (TYPES); writes it on first use."""
    folder = home / f"{size}-{scheme}"
    if not (folder / NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_beside(folder, SIZES[size])
        _write(folder / NAME, SIZES[size], scheme)
    return folder


def vocabulary(size: int) -> list[str]:
    """Returns ``size`` tokens: the 256 bytes as GPT-2 spells them, one pair of them, numbered words, and
    SPECIAL.
    """
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(code) for code in (*kept, *range(256, 256 + 256 - len(kept)))]
    words = [f"w{number}" for number in range(size - len(letters) - 1 - len(SPECIAL))]
    return [*letters, letters[0] + letters[1], *words, *SPECIAL]


def _write(path: Path, fields: dict[str, Any], scheme: str) -> None:
    kind, file_type = TYPES[scheme]
    ends = TYPES["int8"][0] if scheme != "bf16" else kind
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), "llama")
    _header(writer, fields)
    writer.add_file_type(file_type)
    rng = np.random.default_rng(0)
    for name, shape in _shapes(fields):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        at_an_end = name in ("token_embd.weight", "output.weight")
        if scheme in BLOCKS and not at_an_end:
            writer.add_tensor(name, _blocks(rng, shape, scheme), raw_dtype=kind)
            continue
        values = rng.standard_normal(shape, np.float32) * np.float32(DEVIATION)
        chosen = ends if at_an_end else kind
        writer.add_tensor(name, quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _blocks(rng: np.random.Generator, shape: tuple[int, ...], scheme: str) -> NDArray[np.uint8]:
    """(rows, bytes of a row), random but for the scales."""
    items, size = gguf.GGML_QUANT_SIZES[TYPES[scheme][0]]
    found = rng.integers(0, 256, (shape[0], shape[1] // items, size), np.uint8)
    first, count = BLOCKS[scheme]
    found[..., first : first + 2 * count] = np.full(count, SCALE, np.float16).view(np.uint8)
    return found.reshape(shape[0], -1)


def _header(writer: gguf.GGUFWriter, fields: dict[str, Any]) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_dimension_count(fields["hidden_size"] // fields["num_attention_heads"])
    writer.add_rope_freq_base(THETA)
    writer.add_vocab_size(fields["vocab_size"])
    tokens = vocabulary(fields["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * (len(tokens) - len(SPECIAL)) + [CONTROL] * len(SPECIAL))
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)


def write_beside(folder: Path, fields: dict[str, Any]) -> None:
    """Writes config.json and tokenizer.json of a model of ``fields``."""
    tokens = vocabulary(fields["vocab_size"])
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": EPS,
        "rope_theta": THETA, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
        "bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | fields))
    special = [
        {"id": tokens.index(token), "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for token in SPECIAL
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: at for at, token in enumerate(tokens)}, "merges": [[tokens[0], tokens[1]]]},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _shapes(fields: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner, vocab = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    kv = hidden // fields["num_attention_heads"] * fields["num_key_value_heads"]
    found: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (vocab, hidden)),
        ("output_norm.weight", (hidden,)),
        ("output.weight", (vocab, hidden)),
    ]
    for layer in range(fields["num_hidden_layers"]):
        found += [
            (f"blk.{layer}.attn_norm.weight", (hidden,)),
            (f"blk.{layer}.attn_q.weight", (hidden, hidden)),
            (f"blk.{layer}.attn_k.weight", (kv, hidden)),
            (f"blk.{layer}.attn_v.weight", (kv, hidden)),
            (f"blk.{layer}.attn_output.weight", (hidden, hidden)),
            (f"blk.{layer}.ffn_norm.weight", (hidden,)),
            (f"blk.{layer}.ffn_gate.weight", (inner, hidden)),
            (f"blk.{layer}.ffn_up.weight", (inner, hidden)),
            (f"blk.{layer}.ffn_down.weight", (hidden, inner)),
        ]
    return found
