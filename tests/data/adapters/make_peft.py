"""Makes the samples beside this file with PEFT itself, and what its models answer. Run it where peft is installed.

python make_peft.py        writes base/, plain/, spread/ and answers.json
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
TOKENS = [[1, 5, 9, 22, 7, 30, 2, 2, 17, 11], [39, 0, 4]]
SAMPLES = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "spread": {
        "r": 6,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
        "rank_pattern": {"down_proj": 3, r"layers\.1\.self_attn\.q_proj": 8},
        "alpha_pattern": {"up_proj": 11},
    },
}


def main() -> None:
    torch.manual_seed(3)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(**sizes, **heads, **ends, initializer_range=0.3, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(HERE / "base")
    answers = {name: one(name, settings) for name, settings in SAMPLES.items()}
    versions = {name: version(name) for name in ("peft", "transformers", "torch", "safetensors")}
    (HERE / "answers.json").write_text(
        json.dumps({"versions": versions, "tokens": TOKENS, "logprobs": answers}) + "\n"
    )


def one(name: str, settings: dict) -> list[list[float]]:
    """Each token's logprob after those before it, by PEFT's unmerged model."""
    base = LlamaForCausalLM.from_pretrained(HERE / "base", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_" in key:
                weight.normal_(0, 0.4)
    model.save_pretrained(HERE / name)
    (HERE / name / "README.md").unlink(missing_ok=True)
    found = []
    for tokens in TOKENS:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        found.append([round(float(logits[at, token]), 6) for at, token in enumerate(tokens[1:])])
    return found


if __name__ == "__main__":
    main()
