"""Measures what batch invariance costs: attention's fixed splits of keys beside splits that an engine might choose
by batch.

Knows nothing of tokens. A row's bits are its own because sums over inputs and keys are cut at places that don't
depend on who shares the step. In linear layers that forbids nothing that would be faster here: integers add up
exactly, and a product's inputs are summed in one order for one row and for 512. In attention it forbids to choose
how many keys a thread takes by how many sequences there are. So whole steps and attention alone are run turn about
by this library and by ones of other splits, up to a whole sequence in one; the cost is over the fastest of them.

    python -m bench.determinism_cost [--size 150M] [--rounds 9] [--json bench/results/determinism_cost.json]
"""

from __future__ import annotations

import argparse
import ctypes
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console

from baton.bench.engine.attention import CONTEXT, SHAPES, random_pages
from baton.bench.engine.memory import seconds
from baton.bench.engine.models import SIZES, random_runner
from baton.bench.rows import Row, interval, median, table, to_json
from baton.evaluate.workload import Workload
from baton.kernels.abi import native
from baton.kernels.abi.build import built
from baton.kernels.abi.native import I32, P, declare
from baton.kernels.paged_attention.native import Item, Pages, prepared

OURS, OTHERS = 256, (512, 1024, 4096)
TARGET = 5.0  # percent
BATCHES = (1, 16)
Libraries = dict[int, ctypes.CDLL]


def libraries() -> Libraries:
    """Returns libraries by keys per split; the first is the one that is shipped."""
    found = {OURS: native.library()}
    found |= {keys: native.load(built(native.isa(), (f"-DBATON_SPLIT={keys}",))) for keys in OTHERS}
    return {keys: library for keys, library in found.items() if library is not None}


class ChosenStep:
    """The native step of the library whose splits hold ``keys`` keys."""

    def __init__(self, given: Libraries) -> None:
        self._steps = {keys: declare(library, "step", P, P, I32, I32) for keys, library in given.items()}
        self.keys = OURS

    def __call__(self, *arguments: object) -> None:
        """Runs the step."""
        self._steps[self.keys](*arguments)


def steps(size: str, given: Libraries, rounds: int) -> Iterator[Row]:
    """Measures whole decode steps with each of the libraries."""
    step = ChosenStep(given)
    runner, _ = random_runner(size, "int8", "bf16", native_step=step)
    work = Workload(runner, max(BATCHES))
    for batch in BATCHES:

        def once(keys: int, batch: int = batch) -> float:
            step.keys = keys
            return work.decode_seconds(batch)

        yield _row(f"decode step, {size} int8, bf16 KV of 512 tokens, batch {batch}", once, rounds)


def attention(given: Libraries, rounds: int) -> Iterator[Row]:
    """One layer's attention over 4,096 tokens of each sequence."""
    heads, kv_heads, head_dim, layers = SHAPES["12/4 heads of 64"]
    pages = random_pages("bfloat16", kv_heads, head_dim, layers, CONTEXT)
    table = list(range(len(pages)))
    random.Random(0).shuffle(table)
    for batch in BATCHES:
        items: list[Item] = [(table, CONTEXT - 1, 1)] * batch
        q = torch.randn(batch, heads, head_dim)

        def once(keys: int, items: list[Item] = items, q: torch.Tensor = q) -> float:
            calls = [
                prepared(
                    given[keys], q, Pages(pages, "bfloat16", kv_heads, head_dim, layers, layer), items,
                    torch.empty_like(q),
                )
                for layer in range(layers)
            ]  # fmt: skip
            return seconds(lambda: [call() for call in calls])

        yield _row(f"attention alone, {CONTEXT} tokens, bf16 KV, batch {batch}", once, rounds)


def _row(what: str, once: Callable[[int], float], rounds: int) -> Row:
    took = [{keys: once(keys) for keys in (OURS, *OTHERS)} for _ in range(rounds + 1)][1:]
    best = min(OTHERS, key=lambda keys: median([each[keys] for each in took]))
    costs = [100 * (each[OURS] / each[best] - 1) for each in took]
    low, high = interval(costs)
    name = f"added by splits of {OURS} keys over {best}, {what}"
    return Row(name, median(costs), "%", target=TARGET, ceiling=True, low=low, high=high)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150M")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    given = libraries()
    found = [*steps(args.size, given, args.rounds), *attention(given, args.rounds)]
    Console(highlight=False, width=150).print(table(found))
    if args.json:
        args.json.write_text(to_json(found) + "\n")


if __name__ == "__main__":
    main()
