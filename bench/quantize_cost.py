"""Measures what `baton quantize` takes of a model of random weights: CPU seconds and peak memory, layer by layer.

Knows nothing of how weights are rounded. Memory is the process's resident set above that of an interpreter with
everything imported and nothing read; Linux only.

    python -m bench.quantize_cost [--size 0.5B] [--method gptq] [--layers 3] [--samples 128] [--threads 1]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from baton.bench.engine.models import SIZES
from baton.bench.rows import Row, table
from baton.process.heap import return_freed_memory
from baton.quantize.layers import layers_of
from baton.quantize.run import quantize
from baton.quantize.schemes import Recipe
from baton.quantize.source import Source
from baton.quantize.stats import ActivationStats
from bench.peers.random_checkpoint import checkpoint_of

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what makes VmHWM the resident set of now (proc(5))
MIB = 1 << 20


class _Enough(Exception):
    """Ends a run after the layers that are measured."""


class Meter:
    """Notes CPU seconds and peak memory of each layer, as ``quantize`` tells where it is."""

    def __init__(self, layers: int) -> None:
        return_freed_memory()
        self._idle, self._layers = _resident("VmRSS"), layers
        self.found: list[tuple[float, int]] = []  # CPU seconds, and bytes above the idle interpreter
        self._restart()

    def __call__(self, done: int, of: int) -> None:
        self.found.append((time.process_time() - self._since, _resident("VmHWM") - self._idle))
        if done == min(self._layers, of):
            raise _Enough
        self._restart()

    def _restart(self) -> None:
        CLEAR.write_text(RESET_PEAK)
        self._since = time.process_time()


def _resident(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def bar(source: Source) -> int:
    """Returns the bytes of the largest layer's Hessians, and of two such layers in float32."""
    most = 0
    for ops in layers_of(source.program):
        names = [str(getattr(op, "weight", "")) for op in ops]
        shapes = [source.weights[name].shapes for name in names if name in source.weights]
        products = [shape for shape in shapes if len(shape[0]) == 2]
        hessians = sum(shape[0][1] ** 2 for shape in products)
        most = max(most, 4 * hessians + 8 * sum(rows * k for shape in products for rows, k in shape))
    return most


def measure(model: Path, recipe: Recipe, layers: int, samples: int, tokens: int) -> Iterator[Row]:
    """Yields the rows of a run over random token ids, of the first ``layers`` layers."""
    vocab = Source(str(model)).program.vocab_size
    text = [[random.randrange(vocab) for _ in range(tokens)] for _ in range(samples)]
    ActivationStats(64, 64).add(torch.randn(64, 64))  # loads what products load
    meter = Meter(layers)
    source = Source(str(model))
    with tempfile.TemporaryDirectory(dir=model.parent) as out, contextlib.suppress(_Enough):
        quantize(source, recipe, text, Path(out, "out"), meter)
    names = ["before the layers", *(f"layer {at}" for at in range(len(meter.found) - 1))]
    for name, (seconds, size) in zip(names, meter.found, strict=True):
        yield Row(f"{name}: CPU", seconds, "s")
        yield Row(f"{name}: peak", size / MIB, "MiB")
    most = max(size for _, size in meter.found)
    yield Row("peak", most / MIB, "MiB", target=bar(source) / MIB, ceiling=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.5B", choices=sorted(SIZES))
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir(), "baton-random"))
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    recipe = Recipe(args.method).checked()
    found = list(measure(checkpoint_of(args.home, args.size), recipe, args.layers, args.samples, args.tokens))
    Console(highlight=False, width=120).print(table(found))


if __name__ == "__main__":
    main()
