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

from tests.conformance.kinds import KINDS
from tests.conformance.small_kinds import SMALL, SMALL_BASE

CONTEXT = 1024
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


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
            elif name.endswith("correct_output_scale"):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("sinks"):
                weight.normal_(1.0, 2.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
