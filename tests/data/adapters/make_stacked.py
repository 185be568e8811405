"""Makes the samples in stacked/ with PEFT itself: adapters on parameters that hold all experts of a layer.

python make_stacked.py            writes stacked/MODEL/base, stacked/MODEL/adapter and stacked/MODEL/answers.json
python make_stacked.py crossed    with a PEFT before 0.19: stacked/qwen3_moe/crossed and crossed.json
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from peft import LoraConfig, __version__, get_peft_model
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

HERE = Path(__file__).parent / "stacked"
TOKENS = [[1, 5, 9, 22, 7, 30, 2, 2, 17, 11], [39, 0, 4]]
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8, "initializer_range": 0.3}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
MODELS = {
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **SIZES, **HEADS, **ENDS, intermediate_size=24, num_local_experts=3, num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"], sliding_window=4,
        ),
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SIZES, **HEADS, **ENDS, intermediate_size=24, moe_intermediate_size=8, num_experts=3,
            num_experts_per_tok=2, norm_topk_prob=True,
        ),
    ),
}  # fmt: skip
LORA = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "r": 3,
    "lora_alpha": 5,
    "alpha_pattern": {"down_proj": 7},
}


def main() -> None:
    if sys.argv[1:] == ["crossed"]:
        answer("qwen3_moe", "crossed", "crossed.json")
        return
    for at, (name, (model, config)) in enumerate(MODELS.items()):
        torch.manual_seed(at)
        model(config).save_pretrained(HERE / name / "base")
        answer(name, "adapter", "answers.json")


def answer(name: str, directory: str, file: str) -> None:
    """Saves an adapter beside every expert, and each token's logprob after those before it, by PEFT's model."""
    torch.manual_seed(7)
    base = MODELS[name][0].from_pretrained(HERE / name / "base", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **LORA))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_" in key:
                weight.normal_(0, 0.4)
    model.save_pretrained(HERE / name / directory)
    (HERE / name / directory / "README.md").unlink(missing_ok=True)
    file_of_config = HERE / name / directory / "adapter_config.json"
    config = json.loads(file_of_config.read_text()) | {"base_model_name_or_path": None}
    file_of_config.write_text(json.dumps(config, indent=2))
    found = []
    for tokens in TOKENS:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        found.append([round(float(logits[at, token]), 6) for at, token in enumerate(tokens[1:])])
    versions = {"peft": __version__} | {one: version(one) for one in ("transformers", "torch", "safetensors")}
    said = {"versions": versions, "tokens": TOKENS, "logprobs": found}
    (HERE / name / file).write_text(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
