"""Measure an exported checkpoint's held-out loss as bits per byte.

The figure depends only on the exported folder and a text file.  Documents are separated by a form feed;
each starts after a begin token and is cut into windows of at most the model's context length, and every
token after the begin token is predicted once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from model import Llama, load
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F


def documents(path: Path) -> list[str]:
    """Read the held-out documents of a file."""
    return [text.strip("\n") for text in path.read_bytes().decode("utf-8").split("\f") if text.strip()]


def rows(tokenizer: Tokenizer, texts: list[str], length: int) -> Iterator[list[int]]:
    """Yield token windows; the first token of each window is context only."""
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=True).ids
        for start in range(0, len(ids) - 1, length):
            yield ids[start : start + length + 1]


@torch.inference_mode()
def nats(model: Llama, ids: list[int]) -> Tensor:
    """Return the cross entropy in nats of every token after the first."""
    tokens = torch.tensor([ids])
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits[0], tokens[0, 1:], reduction="none")


def measure(directory: Path, text: Path, length: int) -> dict[str, float]:
    """Return bits per byte, loss per token and the counts behind them."""
    model = load(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = documents(text)
    length = min(length, model.shape.max_position_embeddings)
    losses = [nats(model, ids) for ids in rows(tokenizer, texts, length)]
    total, count = sum(x.sum().item() for x in losses), sum(len(x) for x in losses)
    size = sum(len(t.encode()) for t in texts)
    return {
        "bits_per_byte": total / math.log(2) / size,
        "nats_per_token": total / count,
        "tokens": float(count),
        "bytes": float(size),
        "documents": float(len(texts)),
        "parameters": float(sum(p.numel() for p in model.parameters())),
    }


def positions(directory: Path, text: Path, bucket: int = 256) -> list[tuple[int, float]]:
    """Return the mean loss per token by position, over all documents joined into full-length rows."""
    model = load(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = [i for t in documents(text) for i in tokenizer.encode(t, add_special_tokens=True).ids]
    length = model.shape.max_position_embeddings
    starts = range(0, len(ids) - length, length)
    mean = torch.stack([nats(model, ids[s : s + length + 1]) for s in starts]).mean(0)
    return [(i, mean[i : i + bucket].mean().item()) for i in range(0, length, bucket)]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="exported model folders")
    parser.add_argument("--text", type=Path, default=Path("models/demo/heldout.txt"))
    parser.add_argument("--length", type=int, default=2048, help="longest window in tokens")
    parser.add_argument("--positions", action="store_true", help="also print the loss by position in the context")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for directory in arguments.models:
        figures = measure(directory, arguments.text, arguments.length)
        print(
            f"{directory}: "
            + ", ".join(f"{name} {value:.4f}".rstrip("0").rstrip(".") for name, value in figures.items())
        )
        if arguments.positions:
            for start, loss in positions(directory, arguments.text):
                print(f"  position {start:5}: {loss:.4f} nats per token")


if __name__ == "__main__":
    main()
