"""Measures what thinking about drafts takes of a decode step: each call of the drafter between two steps, in the
CPU time of the engine's thread.

The model's steps run in between, so that calls find the caches as a step leaves them. The texts are those of
``bench.speculation``. A step's calls are summed: planning, judging, learning the step's duration, and the ends of
answers. Knows nothing of what drafts bring.

    python -m bench.planning_cost [--size 150M] [--scheme int8] [--batches 1,8] [--rounds 12] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from baton.bench.engine.models import SIZES, random_runner
from baton.bench.engine.report import SCHEMES
from baton.bench.rows import Row, median, table, to_json
from baton.engine.speculate.draft import Draft, SequenceView, States
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.judge import Writer
from baton.engine.speculate.names import AUTO, speculators
from bench.speculation_loop import Bench, Extent
from bench.speculation_texts import copied, misleading, new, texts

KINDS = (copied, new, misleading)
MOST_SHARE = 0.02  # of a step that a call may take where drafts bring nothing


class Metered(Drafter):
    """Is a drafter that counts the CPU seconds of its calls by step: each ``plan`` begins one."""

    def __init__(self) -> None:
        super().__init__(speculators(AUTO), time.thread_time, trees=True)
        self.spent: list[float] = []

    @contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        if self.spent:
            self.spent[-1] += time.thread_time() - began

    def plan(self, writers: Sequence[Writer], prompt_tokens: int = 0, limit_s: float = 0.0) -> dict[int, Draft]:
        """Begins a step and returns its drafts."""
        self.spent.append(0.0)
        with self._counted():
            return super().plan(writers, prompt_tokens, limit_s)

    def observe(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Learns a step's duration."""
        with self._counted():
            super().observe(rows, prompt_tokens, seconds)

    def judge(
        self, text: SequenceView, draft: Draft, accepted: int, chosen: Sequence[int] = (), rows: Sequence[int] = ()
    ) -> None:
        """Learns how much of a draft was accepted."""
        with self._counted():
            super().judge(text, draft, accepted, chosen, rows)

    def saw(self, text: SequenceView, first: int, states: States) -> None:
        """Passes the target's hidden states to speculators."""
        with self._counted():
            super().saw(text, first, states)

    def end(self, text: SequenceView) -> None:
        """Learns that a sequence ended."""
        with self._counted():
            super().end(text)


def rows_of(bench: Bench, batch: int) -> Iterator[Row]:
    """Yields the distribution of a step's planning by kind of text, in microseconds and in shares of a step."""
    for kind in KINDS:
        drafter, plain = Metered(), list[float]()
        for at in range(bench.extent.rounds + 1):
            prompts, scripts = texts(batch, 1000 + at, kind)
            plain += bench.run(prompts, scripts, None).steps
            if at == 1:
                drafter.spent.clear()  # what came before warmed up
            bench.run(prompts, scripts, drafter)
        spent, step_s, name = sorted(drafter.spent), median(plain), f"batch {batch}, {kind.__name__} text"
        about = f"{name}: mean of {len(spent)} steps of {1e3 * step_s:.1f} ms"
        yield Row(about, 1e6 * sum(spent) / len(spent), "us")
        for part, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("most", 1.0)):
            value = spent[min(len(spent) - 1, int(share * len(spent)))]
            most = MOST_SHARE if part == "p99" and kind is not copied else 0.0
            about = f"{name}: {part}, {1e6 * value:.0f} us"
            yield Row(about, value / step_s, "of a step", target=most, ceiling=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150M")
    parser.add_argument("--scheme", choices=SCHEMES, default="int8")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    runner, console = random_runner(args.size, args.scheme, "bf16")[0], Console(width=150)
    bench, rows = Bench(runner, max(batches), Extent(args.rounds), cpu=True, size=args.size), list[Row]()
    for batch in batches:
        rows += (found := list(rows_of(bench, batch)))
        console.print(table(found))
    if args.json:
        args.json.write_text(to_json(rows) + "\n")


if __name__ == "__main__":
    main()
