"""What quantization costs: a model's loss on held-out text, in bits per byte, by scheme, through the engine itself.

Knows nothing of how weights are rounded. Documents are separated by a form feed and cut into windows of the model's
context; every token but a window's first is predicted once (as examples/demo_model/evaluate.py does).

    python -m bench.quantized_loss [--model DIRECTORY] [--documents N]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from baton.console.kvbench.rows import Row, table
from baton.engine.load import EngineConfig, load_runner
from baton.engine.plan import SequenceStep, StepPlan
from baton.protos.nouns import BLOCK_TOKENS

DEMO = Path(__file__).parents[1] / "models" / "demo"
WINDOW = 1024
MOST = {"int8": 0.002, "int4": 0.03}  # share of the unquantized loss


def windows(text: Path, tokenizer: Tokenizer, documents: int) -> tuple[list[list[int]], int]:
    """Token windows of the first ``documents``, and the bytes they stand for."""
    texts = [t.strip("\n") for t in text.read_bytes().decode().split("\f") if t.strip()][:documents]
    cut = [row for t in texts for row in _cut(tokenizer.encode(t, add_special_tokens=True).ids)]
    return cut, sum(len(t.encode()) for t in texts)


def _cut(ids: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(ids) - 1, WINDOW - 1):
        yield ids[start : start + WINDOW]


def bits_per_byte(config: EngineConfig, rows: list[list[int]], size: int) -> float:
    """The loss of one configuration."""
    runner = load_runner(config)
    pages = list(range(-(-WINDOW // BLOCK_TOKENS)))
    buffer = bytearray(len(pages) * runner.spec.layout.page_bytes)
    runner.bind(memoryview(buffer), len(pages))
    total = 0.0
    for ids in rows:
        step = SequenceStep(0, ids[:-1], 0, pages, is_prefill=True, targets=ids[1:])
        total -= sum(found.chosen.logprob for found in runner.run(StepPlan((step,))).scored[0])
    return total / math.log(2) / size


def measure(model: Path, text: Path, documents: int) -> Iterator[Row]:
    """A row per scheme, and what int8 and int4 add to the loss of bfloat16 weights."""
    rows, size = windows(text, Tokenizer.from_file(str(model / "tokenizer.json")), documents)
    base = bits_per_byte(EngineConfig(str(model), dtype="bfloat16", kv_cache_dtype="float32"), rows, size)
    yield Row("loss, bfloat16 weights", base, "bits/byte")
    yield Row("loss, float32", bits_per_byte(EngineConfig(str(model)), rows, size), "bits/byte")
    for scheme, most in MOST.items():
        found = bits_per_byte(EngineConfig(str(model), quantization=scheme), rows, size)  # type: ignore[arg-type]
        yield Row(f"loss, {scheme} weights", found, "bits/byte")
        yield Row(f"added by {scheme}", 100 * (found / base - 1), "%", target=100 * most, ceiling=True)


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
