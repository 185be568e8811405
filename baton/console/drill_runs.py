"""Prints what ``baton drill`` finds in simulated clusters. Knows nothing of flags."""

from __future__ import annotations

from collections import Counter

import msgspec
from rich.console import Console
from rich.table import Table

from baton.console.output import print_table
from baton.drill.coverage import PHASES, await_points, reached
from baton.drill.draw import draw
from baton.drill.many import drill, judged
from baton.drill.run import Verdict, as_test, play, shrink
from baton.drill.scenario import FAULTS, Scenario, Size

SHOWN_EVERY = 200  # seeds between two lines of progress
MOST_STORIES = 3  # failing seeds that are made small, because each takes up to 300 runs


def run_seeds(
    first: int,
    count: int | None,
    limit_s: float | None,
    size: Size,
    cores: int,
    twice: bool,
    as_json: bool,
    small: bool,
) -> int:
    """Plays seeds and prints what came of them; returns the exit status. ``small``: what failed is made small."""
    found = _Sum(as_json)
    for verdict in drill(first, count, limit_s, size, cores, twice):
        found.add(verdict)
    found.end()
    for failed in found.failed[: MOST_STORIES if small and not twice else 0]:
        _make_small(draw(failed.seed, size), as_json)
    return 1 if found.failed else 0


class _Sum:
    """Adds up the verdicts of many runs and prints them."""

    def __init__(self, as_json: bool) -> None:
        self.failed: list[Verdict] = []
        self._as_json, self._console = as_json, Console(stderr=True, highlight=False)
        self._runs = self._answered = self._refused = self._cancelled = 0
        self._virtual_s = self._took_s = 0.0
        self._met: Counter[str] = Counter()
        self._cancelled_at: set[tuple[str, int]] = set()

    def add(self, verdict: Verdict) -> None:
        """Counts a run; a failed one is told at once."""
        self._runs += 1
        self._answered += verdict.answered
        self._refused += verdict.failed
        self._cancelled += verdict.cancelled
        self._virtual_s += verdict.virtual_s
        self._took_s += verdict.took_s
        self._met.update(verdict.met)
        self._cancelled_at.update(verdict.cancelled_at)
        if not verdict.held:
            self.failed.append(verdict)
            self._console.print(f"seed {verdict.seed}: {'; '.join(verdict.violations[:3])}", markup=False)
        elif self._runs % SHOWN_EVERY == 0:
            self._console.print(f"{self._runs} seeds, {len(self.failed)} failed")

    def end(self) -> None:
        """Prints the sums of all runs, as a sentence or as JSON."""
        speed = self._virtual_s / self._took_s if self._took_s else 0.0
        sums = {
            "seeds": self._runs,
            "failed": [verdict.seed for verdict in self.failed],
            "answers": self._answered,
            "typed_errors": self._refused,
            "cancelled": self._cancelled,
            "simulated_seconds": round(self._virtual_s, 1),
            "times_real_time": round(speed, 1),
            "met": dict(self._met),
            "awaits_cancelled": len(reached(self._cancelled_at)),
            "awaits": len(await_points()),
        }
        if self._as_json:
            print(msgspec.json.encode(sums).decode())
            return
        failed = f"{len(self.failed)} failed" if self.failed else "every invariant held"
        print(
            f"{self._runs} seeds: {failed}. {self._answered} answers as the oracle's, "
            f"{self._refused} typed errors, {self._cancelled} cancelled; "
            f"{self._virtual_s:.0f} simulated seconds, {speed:.0f} times real time"
        )
        self._matrix()

    def _matrix(self) -> None:
        """Prints which faults met which work, and how many awaits a cancellation met."""
        columns = [f"{role} {phase}" for role in ("prefill", "decode") for phase in PHASES]
        columns = [*(c for c in columns if any(key.endswith(" " + c) for key in self._met)), "router any"]
        table = Table("fault", *columns, box=None)
        for kind in FAULTS:
            counts = [self._met[f"{kind} {column}"] for column in columns]
            table.add_row(kind, *(str(count or ".") for count in counts))
        print_table(table)
        print(f"cancelled at {len(reached(self._cancelled_at))} of {len(await_points())} awaits")


def run_scenario(chosen: Scenario, trace: bool, twice: bool, as_json: bool, small: bool) -> int:
    """Plays one scenario and prints its verdict, ``trace``: its story too; returns the exit status."""
    verdict = judged(chosen, twice, keep_story=trace)
    if as_json:
        print(msgspec.json.encode(verdict).decode())
    else:
        for line in verdict.lines:
            print(line)
        print(f"seed {verdict.seed}: {'; '.join(verdict.violations) or 'every invariant held'} ({verdict.digest})")
    if small and not twice and not verdict.held and not as_json:
        _make_small(chosen, as_json)
    return 0 if verdict.held else 1


def _make_small(chosen: Scenario, as_json: bool) -> None:
    """Prints the least scenario that still fails, as a regression test takes it."""
    small = shrink(chosen, lambda tried: not play(tried, first_only=True).held)
    verdict, console = play(small, keep_story=True), Console(stderr=True, highlight=False)
    console.print(
        f"\nseed {chosen.seed}, made small: {len(small.requests)} of {len(chosen.requests)} requests, "
        f"{len(small.faults)} of {len(chosen.faults)} faults. {'; '.join(verdict.violations)}",
        markup=False,
    )
    if not as_json:
        for line in verdict.lines:
            console.print(line, markup=False)
    if as_json:
        print(msgspec.json.encode(small).decode())
        return
    console.print("a test of it; `baton drill --trace --scenario FILE` plays what stands in FOUND:")
    print(as_test(small))
