"""Tiny random Hugging Face checkpoints with a tokenizer, made on the spot: what parity is measured on.

Knows nothing of engines. ``make(directory, kind)`` writes one; ``KINDS`` names the shapes. The initializer range
is large, so that greedy answers vary and don't fall into a loop of one token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.overrides import TorchFunctionMode

CONTEXT = 1024
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama"},
    "llama3": {
        "model_type": "llama",
        "rope_parameters": LLAMA3_ROPE,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 144,
        "head_dim": 24,
        "vocab_size": 1003,
    },
    "llama_linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama_yarn": {"model_type": "llama", "rope_parameters": YARN_ROPE, "num_key_value_heads": 1},
    "llama_dynamic": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "num_key_value_heads": 4,
    },
    "mistral": {
        "model_type": "mistral",
        "sliding_window": 37,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 80,
        "hidden_size": 160,
        "vocab_size": 777,
    },
    "mistral_full": {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 2},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 1117},
    "qwen2_mixed": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 50,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 40,
        "hidden_size": 96,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 72,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 56,
        "mlp_only_layers": [0],
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 24,
    },
    "qwen3_moe_norm": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "num_attention_heads": 4,
        "kv_lora_rank": 44,
        "q_lora_rank": 52,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 12,
        "v_head_dim": 28,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "num_hidden_layers": 3,
    },
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2",
        "kv_lora_rank": 30,
        "q_lora_rank": None,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 56,
        "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.7},
        "attention_bias": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "hidden_size": 96,
        "kv_lora_rank": 48,
        "q_lora_rank": 36,
        "qk_nope_head_dim": 18,
        "qk_rope_head_dim": 10,
        "v_head_dim": 22,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_hidden_layers": 3,
        "vocab_size": 1003,
    },
    "gemma2": {
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 40,
        "hidden_size": 144,
        "query_pre_attn_scalar": 28,
        "sliding_window": 37,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 7.0,
        "vocab_size": 1003,
        "initializer_range": 0.06,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "query_pre_attn_scalar": 31,
        "sliding_window": 29,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 250000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "vocab_size": 777,
    },
    "phi3": {
        "model_type": "phi3",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 240,
        "head_dim": 40,
        "sliding_window": 43,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        "vocab_size": 1021,
        "tie_word_embeddings": True,
    },
    "phi3_long": {
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "original_max_position_embeddings": 1000,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [1.0 + 1.5 * i for i in range(8)],
        },
    },
    "olmo2": {
        "model_type": "olmo2",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 144,
        "vocab_size": 1009,
    },
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size": 160,
        "sliding_window": 31,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {**YARN_ROPE, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
        "vocab_size": 997,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 40,
        "hidden_size": 96,
        "intermediate_size": 56,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 33,
        "swiglu_limit": 1.5,
        "rope_parameters": {**YARN_ROPE, "rope_theta": 150000.0, "truncate": False},
        "vocab_size": 1013,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_size": 96,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 20,
        "linear_value_head_dim": 28,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
        "vocab_size": 1003,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 40,
        "hidden_size": 96,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 3,
        "vocab_size": 1009,
        "tie_word_embeddings": True,
    },
    "bamba": {
        "model_type": "bamba",
        "num_hidden_layers": 4,
        "attn_layer_indices": [2],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 144,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 20,
        "vocab_size": 1003,
    },
    "qwen3_bias": {"model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 24, "attention_bias": True},
}

# Kinds that only tests/conformance/test_small_kinds.py asks, as small as their arithmetic allows.
SMALL: dict[str, dict[str, Any]] = {
    "granite": {
        "model_type": "granite",
        "num_key_value_heads": 2,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.09,
        "logits_scaling": 3.0,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 3, "num_key_value_heads": 2},
    "exaone4": {
        "model_type": "exaone4",
        "sliding_window": 21,
        "sliding_window_pattern": 2,
        "num_key_value_heads": 2,
    },
    "ministral": {
        "model_type": "ministral",
        "head_dim": 24,
        "sliding_window": 19,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 24, "num_key_value_heads": 1, "attention_out_bias": True},
    "gemma": {"model_type": "gemma", "head_dim": 24, "num_key_value_heads": 1},
    "glm4_moe": {
        "model_type": "glm4_moe",
        "head_dim": 24,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "routed_scaling_factor": 1.5,
        "n_group": 2,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_key_value_heads": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "glm4": {
        "model_type": "glm4",
        "head_dim": 24,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "eos_token_id": [],
    },
    "glm": {"model_type": "glm", "head_dim": 16, "num_key_value_heads": 2, "eos_token_id": []},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 24, "num_key_value_heads": 1, "use_bias": True},
    "granite_hybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "position_embedding_type": "rope",
        "num_key_value_heads": 2,
        "mamba_n_heads": 8,
        "mamba_d_state": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.7,
    },
    "granite_dense": {
        "model_type": "granitemoehybrid",
        "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "nope",
        "num_local_experts": 0,
        "shared_intermediate_size": 72,
        "residual_multiplier": 0.6,
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 24,
        "num_key_value_heads": 2,
        "rope_parameters": YARN_ROPE
        | {
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "llama4": {
        "model_type": "llama4_text",
        "head_dim": 24,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 2,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "intermediate_size_mlp": 72,
        "floor_scale": 9,
        "attn_scale": 0.3,
    },
    "cohere2": {
        "model_type": "cohere2",
        "num_key_value_heads": 2,
        "sliding_window": 23,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "logit_scale": 0.4,
    },
    "cohere": {"model_type": "cohere", "num_key_value_heads": 2, "logit_scale": 1.5},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_key_value_heads": 1,
        "head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "head_dim": 24,
        "num_key_value_heads": 2,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "num_key_value_heads": 2,
        "sliding_window": 23,
        "norm_epsilon": 1e-4,
    },
    "phimoe": {
        "model_type": "phimoe",
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.2,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.2 * i for i in range(8)],
            "long_factor": [1.0 + 1.5 * i for i in range(8)],
            "short_mscale": 1.2,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 512,
        },
    },
    "hunyuan_dense": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 24,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    },
    "hunyuan_moe": {
        "model_type": "hunyuan_v1_moe",
        "head_dim": 24,
        "num_key_value_heads": 2,
        "num_experts": 5,
        "moe_topk": [2, 2, 2],
    },
    "jamba": {
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "mamba_d_state": 12,
        "mamba_dt_rank": 7,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 2},
}

SMALL_BASE: dict[str, Any] = {"vocab_size": 331, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3}

BASE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make(
    directory: Path, kind: str, seed: int = 0, shards: int = 1, tokenizer: bool = False, **changes: Any
) -> Path:
    """Write the checkpoint ``kind`` with ``changes`` to its config, and return ``directory``."""
    quiet()
    fields = BASE | (KINDS[kind] if kind in KINDS else SMALL_BASE | SMALL[kind]) | changes
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    vary(model)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(directory, max_shard_size=size + 1 if shards == 1 else size // shards)
    if tokenizer:
        write_tokenizer(directory, fields["vocab_size"])
    return directory


def quiet() -> None:
    """No progress bars and advice from transformers."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Loads the checkpoint into transformers with eager attention; in float64 its experts are eager as well."""
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", **experts
    ).eval()


class Float64(TorchFunctionMode):
    """While entered, torch computes in float64 what is asked of it in float32.

    Transformers' recurrences, norms and routers ask for float32 whatever the model's dtype is.
    """

    def __torch_function__(
        self, call: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wide = [_widened(value) for value in args], {name: _widened(v) for name, v in (kwargs or {}).items()}
        return (torch.Tensor.double if call is torch.Tensor.float else call)(*wide[0], **wide[1])


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def expected(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probabilities (answer, vocab) that transformers gives at each of the answer's positions.

    A model in float64 computes nothing in float32.
    """
    with torch.inference_mode(), Float64() if model.dtype == torch.float64 else nullcontext():
        logits = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
    return logits.log_softmax(-1)


def prompts(vocab_size: int, count: int = 20, seed: int = 0) -> list[list[int]]:
    """``count`` random prompts of 1 to 700 tokens, the borders among them."""
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 700, *(rng.randint(3, 300) for _ in range(count))][:count]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE trained on this very file, with a chat template, in Hugging Face layout."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


EMBED_SHARE = 0.15


def vary(model: torch.nn.Module) -> None:
    """Norm scales and biases start as ones and zeros in transformers: make them matter.

    Gemma multiplies its embedding, which is its head too: a small one keeps an answer from repeating one token.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                weight.uniform_(0.5, 1.5)
            elif "embed" in name and "Gemma" in type(model).__name__:
                weight.mul_(EMBED_SHARE)
            elif name.endswith("bias"):
                weight.normal_(0, 0.3)
            elif name.endswith("sinks"):
                weight.normal_(1.0, 2.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
