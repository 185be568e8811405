"""Translates the model sizes in a GGUF header into the fields of config.json.

Knows nothing of tensors' formats or of tokenizers. Architectures are llama.cpp's; the header's fields are described
in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.gguf_files.header import GgufHeader
from baton.protos.json import Json

Fields = Json


def config_of(header: GgufHeader) -> Fields:
    """Returns the fields of config.json. Raises CheckpointError for an unknown architecture, and for a bad
    field.
    """
    architecture = header.architecture
    if architecture not in _OWN:
        known = ", ".join(sorted(_OWN))
        raise header.error("general.architecture", f"is {architecture!r}; known are {known}: use safetensors")
    return _common(header) | _OWN[architecture](header)


def _common(header: GgufHeader) -> Fields:
    heads, hidden = header.size("attention.head_count"), header.size("embedding_length")
    vocabulary = header.rows_of("token_embd.weight") or header.size("vocab_size")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": header.size("feed_forward_length", 1),
        "num_hidden_layers": header.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.size("attention.head_count_kv", heads),
        "head_dim": header.size("attention.key_length", header.size("rope.dimension_count", hidden // heads)),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon", 1e-6),
        "max_position_embeddings": header.size("context_length"),
        "rope_theta": header.number("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(header),
        "tie_word_embeddings": not header.has_tensor("output.weight"),
    }


def _scaling(header: GgufHeader) -> Fields | None:
    """Returns the RoPE scaling, None for none. Factors per frequency (Llama 3.1's) are a tensor, given as
    longrope.
    """
    factors = header.floats("rope_freqs.weight")
    if factors is not None:
        each = factors.tolist()
        same = {"short_factor": each, "long_factor": each, "attention_factor": 1.0}
        return {"rope_type": "longrope", **same}
    kind = header.text(f"{header.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise header.error(
            f"{header.architecture}.rope.scaling.type", f"is {kind!r}; none, linear and yarn are known"
        )
    found: Fields = {"rope_type": kind, "factor": header.number("rope.scaling.factor", 1.0)}
    original = header.of_model("rope.scaling.original_context_length")
    return found | ({"original_max_position_embeddings": original} if original else {})


def _llama(header: GgufHeader) -> Fields:
    """Returns the fields of what llama.cpp calls "llama": Llama, Mistral and Mixtral."""
    if header.of_model("expert_count"):
        experts = {"num_local_experts": header.size("expert_count")}
        return {"model_type": "mixtral", **experts, "num_experts_per_tok": header.size("expert_used_count")}
    if header.of_model("attention.sliding_window"):
        return {"model_type": "mistral", "sliding_window": header.size("attention.sliding_window")}
    return {
        "model_type": "llama",
        "attention_bias": header.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": header.has_tensor("blk.0.ffn_up.bias"),
    }


def _qwen2(header: GgufHeader) -> Fields:
    return {"model_type": "qwen2"}


def _qwen3(header: GgufHeader) -> Fields:
    return {"model_type": "qwen3", "attention_bias": header.has_tensor("blk.0.attn_q.bias")}


def _qwen3_moe(header: GgufHeader) -> Fields:
    return {
        "model_type": "qwen3_moe",
        "num_experts": header.size("expert_count"),
        "num_experts_per_tok": header.size("expert_used_count"),
        "moe_intermediate_size": header.size("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp computes them
    }


_OWN: dict[str, Callable[[GgufHeader], Fields]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
}
