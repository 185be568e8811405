"""Chooses how a card runs steps of few rows: by a graph of kernels, or by the megakernel. Knows nothing of devices.

Steps of both ways are run before traffic, one after the other, for each size that the megakernel takes and at two
lengths of the sequences. The megakernel is taken where its tokens are those of the graph and its steps take less
time, all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from baton.engine.backends.cuda.warming import RUNS, decodes, sizes
from baton.engine.plan import StepPlan

REPEATS = 7  # timed runs of a step, behind RUNS that grow workspaces and capture
SHORT, LONG = 1, 2048  # tokens of the sequences
Run = Callable[[StepPlan], tuple[float, Sequence[int]]]  # seconds of a step and its tokens


class WayFigures(NamedTuple):
    """Holds what one way to run steps came to: the median seconds of each step, and its tokens."""

    seconds: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]


class StepChoice(NamedTuple):
    """Says whether the megakernel is taken, and why, with the microseconds of all steps together."""

    mega: bool
    why: str


def small_steps(sequences: int, most: int, pages: int, context: int) -> list[StepPlan]:
    """Returns the steps that are timed: decodes of up to ``most`` of ``sequences`` sequences, with one key and with
    as many as ``context`` and ``pages`` allow, up to LONG.
    """
    counts = [count for count in sizes(sequences) if count <= most]
    lengths = sorted({SHORT, min(LONG, context, pages * 16)})
    return [decodes(count, pages, tokens) for tokens in lengths for count in counts]


def measured(run: Run, plans: Sequence[StepPlan]) -> WayFigures:
    """Runs each plan a few times; returns what it came to."""
    figures = []
    for plan in plans:
        runs = [run(plan) for _ in range(RUNS + REPEATS)][RUNS:]
        figures.append((median(seconds for seconds, _ in runs), tuple(runs[-1][1])))
    return WayFigures(tuple(seconds for seconds, _ in figures), tuple(tokens for _, tokens in figures))


def chosen(graph: WayFigures, mega: WayFigures) -> StepChoice:
    """Returns the choice between what both ways came to, for the same plans."""
    if graph.tokens != mega.tokens:
        return StepChoice(False, "the megakernel chose other tokens")
    by_graph, by_mega = (1e6 * sum(way.seconds) for way in (graph, mega))
    said = f"{len(graph.seconds)} steps took {by_graph:.0f} us by graph and {by_mega:.0f} us by the megakernel"
    return StepChoice(by_mega < by_graph, said)
