"""Measures what quantization costs: a model's loss on held-out text, in bits per byte, by scheme, through the
engine itself.

Knows nothing of how weights or KV are rounded, or of how a loss is measured (``baton.evaluate``).

    python -m bench.quantized_loss [--model DIRECTORY] [--documents N] [--json bench/results/quantized_loss.json]
    python -m bench.quantized_loss --folds 10 [--methods gptq,awq] [--threads 1]

The second judges what `baton quantize` makes, in groups of 128. The text is dealt into folds; each is judged by a
checkpoint that was calibrated on the others, so that every document counts and none was read before.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

from baton.bench.rows import Row, table, to_json
from baton.engine.config import EngineConfig
from baton.evaluate.local import LocalSubject
from baton.evaluate.loss import bits
from baton.evaluate.text import cut, read_documents
from baton.quantize.calibration import read_samples
from baton.quantize.run import quantize
from baton.quantize.schemes import Recipe, scheme_of
from baton.quantize.source import Source

DEMO = Path(__file__).parents[1] / "models" / "demo"
WEIGHTS = {"int8": 0.002, "int4": 0.03}  # at most this share of the loss of bfloat16 weights
KV = {"int8": 0.002, "fp8": 0.01}  # of the loss with bfloat16 KV
# Each method's recipe, rounding to the nearest in the same grid, and at most this share of what that adds.
MADE = {
    "gptq": (Recipe("gptq"), Recipe("rtn", format="gptq"), 0.5),
    "awq": (Recipe("awq", symmetric=False), Recipe("rtn", symmetric=False, format="gptq"), 0.7),
}
SAMPLES, TOKENS = 128, 512  # of calibration text, as `baton quantize` takes them


class LossText:
    """The first documents of a file."""

    def __init__(self, path: Path, documents: int) -> None:
        self.texts = read_documents(path, documents)
        self.bytes = sum(len(text.encode()) for text in self.texts)

    def bits_per_byte(self, config: EngineConfig) -> float:
        """Returns the loss of one configuration."""
        local = LocalSubject(config)
        return sum(bits(local, cut(self.texts, local.encode))) / self.bytes


def weights(model: str, text: LossText) -> Iterator[Row]:
    """Yields what int8 and int4 weights add to the loss of bfloat16 ones; KV is float32 throughout."""
    base = text.bits_per_byte(EngineConfig(model, dtype="bfloat16", kv_cache_dtype="float32"))
    yield Row("loss, bfloat16 weights", base, "bits/byte")
    yield Row("loss, float32", text.bits_per_byte(EngineConfig(model)), "bits/byte")
    for scheme, most in WEIGHTS.items():
        yield from _pair(f"{scheme} weights", text, EngineConfig(model, quantization=scheme), base, most)  # type: ignore[arg-type]


def kv(model: str, text: LossText) -> Iterator[Row]:
    """Yields what int8 and fp8 KV add to the loss with bfloat16 KV; weights are as in the checkpoint."""
    base = text.bits_per_byte(EngineConfig(model, kv_cache_dtype="bf16"))
    yield Row("loss, bf16 KV", base, "bits/byte")
    for stored, most in KV.items():
        yield from _pair(f"{stored} KV", text, EngineConfig(model, kv_cache_dtype=stored), base, most)  # type: ignore[arg-type]


def _pair(what: str, text: LossText, config: EngineConfig, base: float, most: float) -> Iterator[Row]:
    found = text.bits_per_byte(config)
    yield Row(f"loss, {what}", found, "bits/byte")
    yield Row(f"added by {what}", 100 * (found / base - 1), "%", target=100 * most, ceiling=True)


class Folds:
    """Held-out text in folds, each judged by a checkpoint that was calibrated on the others."""

    def __init__(self, model: Path, text: LossText, folds: int, threads: int | None) -> None:
        self._source, self._threads = Source(str(model)), threads
        self._folds = [text.texts[at::folds] for at in range(folds)]
        self._plain = sum(self._bits(model, fold) for fold in self._folds)

    def added(self, recipe: Recipe) -> float:
        """Returns what checkpoints by ``recipe`` add to the loss, as a share of it."""
        return sum(self._made(recipe.checked(), at) for at in range(len(self._folds))) / self._plain - 1

    def _made(self, recipe: Recipe, judged: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            out, text = Path(folder, "out"), Path(folder, "calibration.txt")
            rest = [fold for at, fold in enumerate(self._folds) if at != judged]
            text.write_text("\f".join(document for fold in rest for document in fold))
            quantize(self._source, recipe, self._samples(recipe, text), out)
            return self._bits(out, self._folds[judged])

    def _samples(self, recipe: Recipe, text: Path) -> list[list[int]]:
        needed = scheme_of(recipe).needs_text
        return read_samples(self._source.directory, str(text), SAMPLES, TOKENS) if needed else []

    def _bits(self, model: Path, texts: Sequence[str]) -> float:
        with tempfile.TemporaryDirectory() as cache:
            local = LocalSubject(EngineConfig(str(model), threads=self._threads, cache_dir=cache))
            return sum(bits(local, cut(list(texts), local.encode)))


def made(folds: Folds, methods: Sequence[str]) -> Iterator[Row]:
    """Yields what checkpoints that ``baton quantize`` makes add to the loss, beside rounding to the nearest."""
    for method in methods:
        recipe, nearest, most = MADE[method]
        least, found = folds.added(nearest), folds.added(recipe)
        yield Row(f"added by rounding to the nearest in the grid of {method}", 100 * least, "%")
        yield Row(f"added by {method}", 100 * found, "%")
        yield Row(f"{method}, of rounding to the nearest", found / least, "x", target=most, ceiling=True)


def measure(model: Path, path: Path, documents: int) -> Iterator[Row]:
    """Yields every row."""
    text = LossText(path, documents)
    yield Row(f"{len(text.texts)} documents", text.bytes, "bytes")
    yield from weights(str(model), text)
    yield from kv(str(model), text)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--text", type=Path, default=DEMO / "heldout.txt")
    parser.add_argument("--documents", type=int, default=1 << 20, help="the first N; all unless told")
    parser.add_argument("--folds", type=int, default=0, help="judge checkpoints that baton quantize makes")
    parser.add_argument("--methods", default=",".join(MADE))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.folds:
        folds = Folds(args.model, LossText(args.text, args.documents), args.folds, args.threads)
        found = list(made(folds, args.methods.split(",")))
    else:
        found = list(measure(args.model, args.text, args.documents))
    Console(highlight=False, width=150).print(table(found))
    if args.json:
        args.json.write_text(to_json(found) + "\n")


if __name__ == "__main__":
    main()
