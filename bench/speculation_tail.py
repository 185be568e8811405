"""Compares the times between tokens with and without drafts, where drafts bring nothing: the tail that a p99 sees.

A machine's noise differs from second to second by more than drafts could add. So three loops write the same texts
side by side, a step each in turn: one drafts and two don't. Noise meets all three alike. Intervals are by bootstrap
over rounds, because steps that are neighbours in time are alike. Two figures say the same in two ways. The quotient
of p99s is judged by that of the two loops without drafts. The share of steps beyond the p99 of those without drafts
is 1% where nothing differs; it depends less on how long the longest are, and its mean over all texts is judged.

Knows nothing of rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.bench.rows import Row
from baton.engine.speculate.drafter import Drafter
from bench.speculation_drafters import Counted, Oracle
from bench.speculation_loop import Answering, Bench
from bench.speculation_texts import Scripts, misleading, new, texts

LOOPS = 3  # side by side: with drafts, and twice without
BEYOND = ": beyond the p99 of none"  # how the name of a row ends that has the share of such steps
EXPECTED = 0.01  # of steps where nothing differs
RESAMPLES, SEED = 1000, 0  # of rounds
Steps = NDArray[np.float64]  # seconds of steps, (rounds, steps of a round)


class Interval(NamedTuple):
    """Holds a figure and the ends of its 95% interval."""

    value: float
    low: float
    high: float


def tail(bench: Bench, batch: int) -> Iterator[Row]:
    """Yields rows of an oracle that is always wrong, and of the drafts of ``auto`` over text that repeats nothing
    and over misleading text.
    """
    wrong = Oracle({}, 0.0)
    worker = Drafter([wrong], bench.clock)
    for at in range(bench.extent.warm_runs):
        prompts, scripts = texts(batch, 2000 + at, new)
        wrong.follow(scripts, at)
        bench.run(prompts, scripts, worker)
    yield from rows(f"batch {batch}, acceptance 0.0", *_steps(bench, batch, new, worker, wrong.follow))
    for kind in (new, misleading):
        found = _steps(bench, batch, kind, Counted(bench.clock), lambda scripts, seed: None)
        yield from rows(f"batch {batch}, {kind.__name__} text", *found)


def _steps(
    bench: Bench,
    batch: int,
    kind: Callable[..., list[int]],
    drafter: Drafter,
    follow: Callable[[Scripts, int], None],
) -> tuple[Steps, Steps, Steps]:
    """Returns the steps of each loop; the first round isn't counted."""
    rounds = []
    for at in range(bench.extent.tail_rounds_at(batch) + 1):
        prompts, scripts = texts(batch, 3000 + at, kind)
        follow(scripts, at)
        rounds.append(_round([bench.answering(prompts, scripts, one) for one in (drafter, None, None)], bench))
    mine, first, second = (np.array(loop) for loop in zip(*rounds[1:], strict=True))
    return mine, first, second


def _round(loops: Sequence[Answering], bench: Bench) -> list[list[float]]:
    """Returns the seconds of each loop's steps, of which another begins each time."""
    took: list[list[float]] = [[] for _ in loops]
    for at in range(bench.extent.tokens):
        for loop in range(at, at + len(loops)):
            took[loop % LOOPS].append(loops[loop % LOOPS].step())
    for each in loops:
        each.close()
    return took


def rows(name: str, mine: Steps, first: Steps, second: Steps) -> Iterator[Row]:
    """Yields the rows of one text: ``mine`` with drafts, ``first`` and ``second`` without."""
    without = np.concatenate((first, second), axis=1)
    quotient = bootstrapped(lambda drawn: p99(mine[drawn]) / p99(without[drawn]), len(mine))
    apart = bootstrapped(lambda drawn: p99(first[drawn]) / p99(second[drawn]), len(mine))
    most = max(apart.high, 1 / apart.low)
    name = f"{name}: p99 between tokens, of {mine.size} steps"
    yield Row(name, quotient.value, "x of none", target=most, ceiling=True, low=quotient.low, high=quotient.high)
    beyond = bootstrapped(lambda drawn: float((mine[drawn] > p99(without[drawn])).mean()), len(mine))
    yield Row(f"{name}{BEYOND}", beyond.value, "of steps", low=beyond.low, high=beyond.high)


def pooled(found: Sequence[Row]) -> Iterator[Row]:
    """Yields the mean over all texts and batches of the share of steps beyond the p99 of none, if any was measured.
    It may be a hundredth, and what chance explains of more.
    """
    shares = [row for row in found if row.name.endswith(BEYOND)]
    if not shares:
        return
    value = sum(row.value for row in shares) / len(shares)
    half = math.hypot(*((row.high - row.low) / 2 for row in shares)) / len(shares)
    name, most = f"all {len(shares)} texts: steps beyond the p99 of none", EXPECTED + half
    yield Row(name, value, "of steps", target=most, ceiling=True, low=value - half, high=value + half)


def bootstrapped(figure: Callable[[NDArray[np.int64]], float], rounds: int) -> Interval:
    """Returns ``figure`` of all rounds, and its interval over rounds drawn with replacement."""
    rng = np.random.default_rng(SEED)
    drawn = [figure(rng.integers(0, rounds, rounds)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(figure(np.arange(rounds)), float(low), float(high))


def p99(seconds: Steps) -> float:
    """Returns the 99th percentile."""
    return float(np.quantile(seconds, 0.99))
