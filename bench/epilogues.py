"""Measures prompts with the gate in its product's epilogue beside prompts whose gate is an op of its own.

Both ways run in one process, turn about, on the same weights. What is shown is a median over rounds of the prompt's
time by two ops over that by one, and the quartiles of it. Knows nothing of what the ops compute.

    python -m bench.epilogues [--size 150M] [--schemes int8,bf16] [--prompts 512,2048] [--rounds 40]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from baton.bench.engine.models import SIZES, random_runner
from baton.bench.engine.report import SCHEMES
from baton.engine.backends.native.runner import NativeRunner
from baton.evaluate.workload import Workload
from baton.kernels.step import structs


class Ways:
    """Switches a runner between both ways."""

    def __init__(self, runner: NativeRunner) -> None:
        self._ops = runner._program._array
        self._marked = [(op, op.window) for op in self._ops if op.kind in (structs.LINEAR, structs.SWIGLU)]

    def by_one(self, whether: bool) -> None:
        """Has later steps compute gates in epilogues, or by ops of their own."""
        for op, window in self._marked:
            op.window = window if whether else 0


def seconds(runner: NativeRunner, tokens: int, rounds: int) -> list[tuple[float, float]]:
    """Returns the seconds of a prompt by two ops and by one, by round; a first round doesn't count."""
    ways, work, found = Ways(runner), Workload(runner, 1, prompt=tokens), list[tuple[float, float]]()
    for round_ in range(rounds + 1):
        took = dict[bool, float]()
        for one in (round_ % 2 == 0, round_ % 2 == 1):
            ways.by_one(one)
            took[one] = work.prompt_seconds(tokens)
        found.append((took[False], took[True]))
    return found[1:]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the lower quartile, the median and the upper quartile of ``values``."""
    ordered = sorted(values)
    lower, middle, upper = (ordered[len(ordered) * part // 4] for part in (1, 2, 3))
    return lower, middle, upper


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150M")
    parser.add_argument("--schemes", default="int8,bf16", help=f"of {', '.join(SCHEMES)}")
    parser.add_argument("--prompts", default="512,2048")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    shown = Table("scheme", "prompt", "ms by two ops", "ms by one", "two over one", "quartiles", box=None)
    for scheme in args.schemes.split(","):
        runner, _ = random_runner(args.size, scheme, "bf16")
        for tokens in map(int, args.prompts.split(",")):
            took = seconds(runner, tokens, args.rounds)
            two, one = (1e3 * quartiles(each)[1] for each in zip(*took, strict=True))
            lower, middle, upper = quartiles([before / after for before, after in took])
            times = f"{two:.1f}", f"{one:.1f}", f"{middle:.3f}", f"{lower:.3f} to {upper:.3f}"
            shown.add_row(scheme, str(tokens), *times)
    Console(highlight=False, width=150).print(shown)


if __name__ == "__main__":
    main()
