"""What a narrower KV cache costs: a model's loss on held-out text, in bits per byte, for each dtype of stored KV.

Knows nothing of how KV is rounded. Every window is one chunk whose attention reads K and V from the pages, so that
each token pays for the rounding of all before it.

    python -m bench.kv_loss [--model DIRECTORY] [--documents N]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from baton.console.kvbench.rows import Row, table
from baton.engine.load import EngineConfig
from bench.quantized_loss import DEMO, bits_per_byte, windows

MOST = {"int8": 0.002, "fp8": 0.01}  # share of the loss with bfloat16 KV


def measure(model: Path, text: Path, documents: int) -> Iterator[Row]:
    """A row per dtype, and what int8 and fp8 add to the loss of bfloat16 KV."""
    rows, size = windows(text, Tokenizer.from_file(str(model / "tokenizer.json")), documents)

    def loss(stored: str) -> float:
        return bits_per_byte(EngineConfig(str(model), kv_cache_dtype=stored), rows, size)  # type: ignore[arg-type]

    base = loss("bf16")
    yield Row("loss, float32 KV", loss("float32"), "bits/byte")
    yield Row("loss, bf16 KV", base, "bits/byte")
    for stored, most in MOST.items():
        found = loss(stored)
        yield Row(f"loss, {stored} KV", found, "bits/byte")
        added = 100 * (found / base - 1)
        yield Row(f"added by {stored} KV", added, "%", target=100 * most, ceiling=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--text", type=Path, default=DEMO / "heldout.txt")
    parser.add_argument("--documents", type=int, default=40)
    args = parser.parse_args()
    Console().print(table(list(measure(args.model, args.text, args.documents))))


if __name__ == "__main__":
    main()
