"""A Llama of random weights as a GGUF file, for engines that read nothing else. Knows nothing of measuring.

Matrices are all of one type but the head and the embedding, which are Q8_0 in a quantized file: ours keeps the head
in int8 too. There is no vocabulary: whoever runs it feeds token ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from baton.console.enginebench.models import CONTEXT, SIZES

TYPES = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
}


def write(path: Path, size: str, scheme: str) -> None:
    """``size`` of enginebench.models.SIZES in ``scheme`` of TYPES."""
    fields, kind = SIZES[size], TYPES[scheme]
    ends = TYPES["int8"] if scheme != "bf16" else kind
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), "llama")
    _header(writer, fields)
    rng = np.random.default_rng(0)
    for name, shape in _shapes(fields):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        chosen = ends if name in ("token_embd.weight", "output.weight") else kind
        writer.add_tensor(name, quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _header(writer: gguf.GGUFWriter, fields: dict[str, Any]) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(fields["hidden_size"] // fields["num_attention_heads"])
    writer.add_vocab_size(fields["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


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
