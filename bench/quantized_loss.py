"""Measures what quantization costs: a model's loss on held-out text, in bits per byte, by scheme, through the
engine itself.

Knows nothing of how weights or KV are rounded, or of how a loss is measured (``baton.evaluate``).

    python -m bench.quantized_loss [--model DIRECTORY] [--documents N] [--json bench/results/quantized_loss.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from baton.bench.rows import Row, table, to_json
from baton.engine.config import EngineConfig
from baton.evaluate.local import LocalSubject
from baton.evaluate.loss import bits
from baton.evaluate.text import cut, read_documents

DEMO = Path(__file__).parents[1] / "models" / "demo"
WEIGHTS = {"int8": 0.002, "int4": 0.03}  # at most this share of the loss of bfloat16 weights
KV = {"int8": 0.002, "fp8": 0.01}  # of the loss with bfloat16 KV


class Text:
    """The first documents of a file."""

    def __init__(self, path: Path, documents: int) -> None:
        self.texts = read_documents(path, documents)
        self.bytes = sum(len(text.encode()) for text in self.texts)

    def bits_per_byte(self, config: EngineConfig) -> float:
        """Returns the loss of one configuration."""
        local = LocalSubject(config)
        return sum(bits(local, cut(self.texts, local.encode))) / self.bytes


def weights(model: str, text: Text) -> Iterator[Row]:
    """Yields what int8 and int4 weights add to the loss of bfloat16 ones; KV is float32 throughout."""
    base = text.bits_per_byte(EngineConfig(model, dtype="bfloat16", kv_cache_dtype="float32"))
    yield Row("loss, bfloat16 weights", base, "bits/byte")
    yield Row("loss, float32", text.bits_per_byte(EngineConfig(model)), "bits/byte")
    for scheme, most in WEIGHTS.items():
        yield from _pair(f"{scheme} weights", text, EngineConfig(model, quantization=scheme), base, most)  # type: ignore[arg-type]


def kv(model: str, text: Text) -> Iterator[Row]:
    """Yields what int8 and fp8 KV add to the loss with bfloat16 KV; weights are as in the checkpoint."""
    base = text.bits_per_byte(EngineConfig(model, kv_cache_dtype="bf16"))
    yield Row("loss, bf16 KV", base, "bits/byte")
    for stored, most in KV.items():
        yield from _pair(f"{stored} KV", text, EngineConfig(model, kv_cache_dtype=stored), base, most)  # type: ignore[arg-type]


def _pair(what: str, text: Text, config: EngineConfig, base: float, most: float) -> Iterator[Row]:
    found = text.bits_per_byte(config)
    yield Row(f"loss, {what}", found, "bits/byte")
    yield Row(f"added by {what}", 100 * (found / base - 1), "%", target=100 * most, ceiling=True)


def measure(model: Path, path: Path, documents: int) -> Iterator[Row]:
    """Yields every row."""
    text = Text(path, documents)
    yield Row(f"{len(text.texts)} documents", text.bytes, "bytes")
    yield from weights(str(model), text)
    yield from kv(str(model), text)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--text", type=Path, default=DEMO / "heldout.txt")
    parser.add_argument("--documents", type=int, default=1 << 20, help="the first N; all unless told")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = list(measure(args.model, args.text, args.documents))
    Console(highlight=False, width=150).print(table(found))
    if args.json:
        args.json.write_text(to_json(found) + "\n")


if __name__ == "__main__":
    main()
