"""Check exported models: sizes, tokenizer round trips, and text from Hugging Face transformers.

Exits with status 1 when a limit is exceeded or a byte does not survive the tokenizer.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

COMPLETIONS = (
    "The kernel is the part of the operating system that",
    "In the beginning",
    "To install a package, you",
)
CHATS = (
    "Hello!",
    "What is a compiler?",
    "Tell me about file permissions.",
    "What does the word lighthouse mean?",
    "Tell me a story.",
)


def check_size(directory: Path, limit: float) -> bool:
    """Compare the size of a model folder with its limit in megabytes."""
    size = sum(path.stat().st_size for path in directory.iterdir() if path.is_file()) / 1e6
    print(f"{directory}: {size:.2f} MB of at most {limit:g} MB")
    return size <= limit


def check_round_trips(directory: Path, count: int = 2000) -> bool:
    """Encode and decode random texts over all of Unicode, and every single-byte character."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rng = random.Random(0)
    texts = [chr(i) for i in range(256)] + [chr(i) * 3 for i in range(256)]
    for _ in range(count):
        top = rng.choice((0x7F, 0xFF, 0x7FF, 0xD7FF, 0x10FFFF))
        points = [rng.randint(0, top) for _ in range(rng.randint(1, 40))]
        texts.append("".join(chr(p) for p in points if not 0xD800 <= p <= 0xDFFF))
    bad = [
        t
        for t in texts
        if tokenizer.decode(tokenizer.encode(t, add_special_tokens=False).ids, skip_special_tokens=False) != t
    ]
    missing = 256 - sum(tokenizer.token_to_id(c) is not None for c in _byte_alphabet())
    print(f"{directory}: {len(bad)} of {len(texts)} texts changed, {missing} bytes without a token")
    return not bad and not missing


def _byte_alphabet() -> list[str]:
    """Return the 256 characters that stand for single bytes in a byte-level vocabulary."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in shown] + [chr(0x100 + i) for i in range(256 - len(shown))]


def _generate(model: Any, tokenizer: Any, ids: torch.Tensor, sample: bool, tokens: int) -> str:
    """Generate a continuation of token ids as text."""
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.7, "top_p": 0.9} if sample else {"do_sample": False}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, repetition_penalty=1.1, **options
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=False))


def show_text(directory: Path, tokens: int) -> None:
    """Print greedy and sampled text for completions and chats."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = [(text, tokenizer(text, return_tensors="pt").input_ids) for text in COMPLETIONS]
    for text in CHATS:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, return_tensors="pt", add_special_tokens=False).input_ids
        prompts.append((f"[chat] {text}", ids))
    for text, ids in prompts:
        for sample in (False, True):
            kind = "sampled" if sample else "greedy"
            print(f"--- {directory} {kind}: {text}\n{_generate(model, tokenizer, ids, sample, tokens)}")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--draft", type=Path, default=Path("models/demo-draft"))
    parser.add_argument("--tokens", type=int, default=80)
    arguments = parser.parse_args()
    good = True
    for directory, limit in ((arguments.model, 16.0), (arguments.draft, 4.0)):
        if directory.is_dir():
            good = all((good, check_size(directory, limit), check_round_trips(directory)))
            show_text(directory, arguments.tokens)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
