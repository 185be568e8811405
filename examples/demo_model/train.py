"""Train the demo model, or its draft model, from the text that ``corpus.py`` built.

The run is seeded.  The learning-rate schedule follows whichever of ``--steps`` and ``--minutes`` is used up
faster, so that one machine can train against the clock and another can repeat the same number of steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from model import Llama, Shape, export, load
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIALS = (BEGIN, END, PAD, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
SHAPES = {
    "main": Shape(num_attention_heads=4, head_dim=64, intermediate_size=640),
    "draft": Shape(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    ),
}
BATCH_TOKENS = 8192
SHORT, LONG = 512, 2048
CHAT_SHARE = 0.3
Tokens = NDArray[np.uint16]


@dataclass(frozen=True)
class Budget:
    """How long to train and how to spend it."""

    steps: int
    minutes: float
    long_share: float
    warmup_steps: int
    decay_share: float

    def progress(self, step: int, started: float) -> float:
        """Return the share of the budget that is used up, between 0 and 1."""
        return min(1.0, max(step / self.steps, (time.monotonic() - started) / (60 * self.minutes)))

    def rate(self, step: int, progress: float) -> float:
        """Return the learning-rate factor: linear warm-up, constant, then a cosine down to two percent."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        late = max(0.0, (progress - (1 - self.decay_share)) / self.decay_share)
        return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * late)))


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by Newton-Schulz iterations, for weight matrices."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        """Take two-dimensional parameters only."""
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix once."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                velocity.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(velocity, group["momentum"]))
                scale = 0.2 * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Bring the singular values of a matrix close to one (quintic Newton-Schulz)."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(torch.bfloat16)
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)


def read_items(path: Path) -> list[str]:
    """Read the strings of a JSON-lines file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train the byte-level BPE tokenizer; every byte has a token, so any input round-trips."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer, shape: Shape) -> dict[str, bytes]:
    """Return the tokenizer's files in the Hugging Face layout."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIALS
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(SPECIALS[3:]),
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
    }
    mapping = {
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(SPECIALS[3:]),
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "special_tokens_map.json": (json.dumps(mapping, indent=2) + "\n").encode(),
    }


def encode_stream(tokenizer: Tokenizer, items: list[str], end: bool) -> Tokens:
    """Encode items one after the other, each after a begin token and, for plain text, before an end token."""
    suffix = [tokenizer.token_to_id(END)] if end else []
    chunks: list[Tokens] = []
    for start in range(0, len(items), 2000):
        encodings = tokenizer.encode_batch(items[start : start + 2000])
        chunks += [np.array(encoding.ids + suffix, dtype=np.uint16) for encoding in encodings]
    return np.concatenate(chunks)


def prepare(corpus: Path, work: Path, vocab_size: int, seed: int) -> tuple[Tokenizer, Tokens, Tokens]:
    """Train the tokenizer and encode the corpus, or reuse both from ``work``."""
    saved = work / "tokenizer.json"
    if not saved.exists():
        texts, chats = read_items(corpus / "text.jsonl"), read_items(corpus / "chat.jsonl")
        sample = np.random.default_rng(seed).permutation(len(texts))[:9000]
        tokenizer = train_tokenizer([texts[i] for i in sample] + chats[:9000], vocab_size)
        np.save(work / "text.npy", encode_stream(tokenizer, texts, end=True))
        np.save(work / "chat.npy", encode_stream(tokenizer, chats, end=False))
        tokenizer.save(str(saved))
    return Tokenizer.from_file(str(saved)), np.load(work / "text.npy"), np.load(work / "chat.npy")


def windows(tokens: Tokens, length: int, rng: np.random.Generator) -> Iterator[Tokens]:
    """Yield windows of ``length + 1`` tokens for ever, each epoch shifted and in a new order."""
    while True:
        shift = int(rng.integers(length))
        for index in rng.permutation((len(tokens) - shift - 1) // length):
            start = shift + int(index) * length
            yield tokens[start : start + length + 1]


def batches(text: Tokens, chat: Tokens, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of inputs and targets that mix plain text and chat."""
    rng = np.random.default_rng(seed)
    streams = (windows(text, length, rng), windows(chat, length, rng))
    while True:
        picks = rng.random(BATCH_TOKENS // length) < CHAT_SHARE
        rows = np.stack([next(streams[int(pick)]) for pick in picks]).astype(np.int64)
        batch = torch.from_numpy(rows)
        yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def make_optimizers(model: Llama, rate: float) -> list[torch.optim.Optimizer]:
    """Give weight matrices to Muon, and embeddings and norms to AdamW."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.97), weight_decay=0.0, fused=True)
    return [Muon(matrices, lr=rate, momentum=0.95, weight_decay=0.05), adam]


@dataclass
class Run:
    """Everything one training run needs."""

    model: Llama
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizers: list[torch.optim.Optimizer]
    rate: float
    budget: Budget
    streams: tuple[Iterator[tuple[Tensor, Tensor]], Iterator[tuple[Tensor, Tensor]]]
    save: Callable[[], None]
    save_seconds: float

    def step(self, index: int, progress: float) -> tuple[float, int]:
        """Train on one batch; return its loss and its length."""
        late = progress > 1 - self.budget.long_share
        tokens, targets = next(self.streams[int(late)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * self.budget.rate(index, progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item(), tokens.shape[1]

    def train(self) -> int:
        """Train until the budget is spent, printing progress and saving; return the step count."""
        started = saved = time.monotonic()
        average, index = 0.0, 0
        while (progress := self.budget.progress(index, started)) < 1.0:
            loss, length = self.step(index, progress)
            average = loss if index == 0 else 0.98 * average + 0.02 * loss
            index += 1
            now = time.monotonic()
            if index % 25 == 0 or index < 5:
                speed = index * BATCH_TOKENS / (now - started)
                print(
                    f"step {index} {progress:6.1%} length {length} loss {average:.4f} {speed:.0f} tokens/s",
                    flush=True,
                )
            if now - saved > self.save_seconds or index == 100:
                self.save()
                saved = now
        self.save()
        return index


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--corpus", type=Path, required=True, help="the folder corpus.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="where the tokenizer and tokens are kept")
    parser.add_argument("--output", type=Path, required=True, help="where the model is exported")
    parser.add_argument("--init", type=Path, help="an exported model to go on from")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--decay-share", type=float, default=0.6, help="share of the budget the rate falls over")
    parser.add_argument("--long-share", type=float, default=0.15, help="share of the budget on 2048 tokens")
    parser.add_argument("--seed", type=int, default=20240607)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-seconds", type=float, default=180)
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    return parser.parse_args()


def main() -> None:
    """Prepare the data, train, and export."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[arguments.shape]
    tokenizer, text, chat = prepare(arguments.corpus, arguments.work, shape.vocab_size, arguments.seed)
    print(f"{len(text)} text tokens, {len(chat)} chat tokens", flush=True)
    model = load(arguments.init).train() if arguments.init else Llama(shape)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    ids = (SPECIALS.index(BEGIN), SPECIALS.index(END), SPECIALS.index(PAD))
    files = tokenizer_files(tokenizer, shape)
    run = Run(
        model=model,
        loss=model.loss if arguments.no_compile else torch.compile(model.loss, dynamic=False),
        optimizers=make_optimizers(model, arguments.rate),
        rate=arguments.rate,
        budget=Budget(
            steps=arguments.steps,
            minutes=arguments.minutes,
            long_share=arguments.long_share,
            warmup_steps=arguments.warmup_steps,
            decay_share=arguments.decay_share,
        ),
        streams=(batches(text, chat, SHORT, arguments.seed), batches(text, chat, LONG, arguments.seed + 1)),
        save=lambda: export(model, arguments.output, files, ids),
        save_seconds=arguments.save_seconds,
    )
    steps = run.train()
    print(f"done: {steps} steps, {steps * BATCH_TOKENS} tokens")


if __name__ == "__main__":
    main()
