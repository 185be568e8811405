"""Plays many seeds on several cores, up to a number of seeds or a time limit. Knows nothing of terminals."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import msgspec

from baton.drill.draw import draw
from baton.drill.run import Verdict, play
from baton.drill.scenario import Scenario, Size

AHEAD = 4  # seeds per core that are handed out before the first of them is done


def drill(
    first: int, count: int | None, seconds: float | None, size: Size, cores: int, twice: bool = False
) -> Iterator[Verdict]:
    """Yields the verdicts of the seeds from ``first`` on as they come: of ``count`` seeds, or of as many as
    ``seconds`` allow.

    ``cores`` processes play them. With ``twice`` each seed is played again, and fails if the two stories differ.
    """
    until = None if seconds is None else time.monotonic() + seconds
    seeds = itertools.count(first) if count is None else iter(range(first, first + count))
    if cores == 1:
        for seed in seeds:
            if until is not None and time.monotonic() >= until:
                return
            yield _one(seed, size, twice)
        return
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[Verdict]] = set()
        while True:
            open_now = until is None or time.monotonic() < until
            for seed in itertools.islice(seeds, AHEAD * cores - len(running) if open_now else 0):
                running.add(pool.submit(_one, seed, size, twice))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def _one(seed: int, size: Size, twice: bool) -> Verdict:
    return judged(draw(seed, size), twice)


def judged(scenario: Scenario, twice: bool, keep_story: bool = False) -> Verdict:
    """Plays ``scenario`` and returns its verdict; with ``twice`` it is played again, and fails if the stories
    differ.
    """
    verdict = play(scenario, keep_story)
    again = play(scenario) if twice else verdict
    if (again.digest, again.turns) == (verdict.digest, verdict.turns):
        return verdict
    differs = f"two runs differ: {verdict.digest} in {verdict.turns} turns, {again.digest} in {again.turns}"
    return msgspec.structs.replace(verdict, violations=(*verdict.violations, differs))
