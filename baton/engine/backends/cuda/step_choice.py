"""Chooses how a card runs steps of few rows: by a graph of kernels, or by the megakernel. Knows nothing of devices.

Steps of both ways are run before traffic, one after the other, for each size that the megakernel takes and at two
lengths of the sequences. The sequences differ from one another, and the keys and values that the longer ones read
are those of prompts that were computed before. The megakernel is taken where its tokens are those of the graph in
every run, and its steps take less time, all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from baton.engine.backends.cuda.warming import GREEDY, RUNS, sizes
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.protos.nouns import BLOCK_TOKENS

REPEATS = 7  # timed runs of a step, behind RUNS that grow workspaces and capture
LONG = 2048  # most tokens of a sequence
BY_SEQUENCE, BY_POSITION = 7919, 104729  # primes: few vocabularies give two sequences or positions one token
Run = Callable[[StepPlan], tuple[float, Sequence[int]]]  # seconds of a step and its tokens


class WayFigures(NamedTuple):
    """Holds what one way to run steps came to: the median seconds of each step, and the tokens of all its runs."""

    seconds: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]


class StepChoice(NamedTuple):
    """Says whether the megakernel is taken, and why, with the microseconds of all steps together."""

    mega: bool
    why: str


class SmallSteps(NamedTuple):
    """Holds the steps of few rows that are timed, and the steps of prompts whose keys and values they read."""

    prompts: list[StepPlan]
    decodes: list[StepPlan]


def small_steps(sequences: int, most: int, pages: int, context: int, vocab_size: int, chunk: int) -> SmallSteps:
    """Returns the steps that are timed: decodes of up to ``most`` of ``sequences`` sequences, with one key and with
    as many as ``context`` and ``pages`` allow, up to LONG.

    No two sequences have a page in common, so there are no more of them than ``pages``. A step of a prompt has at
    most ``chunk`` tokens. All tokens are below ``vocab_size``.
    """
    held = min(sequences, most, pages)
    own = pages // held  # a sequence's pages: the first one for its only key, the others for many
    length = min(LONG, context, (own - 1) * BLOCK_TOKENS)
    tokens = [[(BY_SEQUENCE * seq + BY_POSITION * at) % vocab_size for at in range(LONG)] for seq in range(held)]
    one_key = [list(range(own * seq, own * seq + 1)) for seq in range(held)]
    many_keys = [list(range(own * seq + 1, own * (seq + 1))) for seq in range(held)]
    decodes = [_decodes(count, 1, tokens, one_key) for count in sizes(held)]
    if length < 2:
        return SmallSteps([], decodes)
    prompts = [
        StepPlan((SequenceStep(seq, tokens[seq][at : min(at + chunk, length - 1)], at, many_keys[seq]),))
        for seq in range(held)
        for at in range(0, length - 1, chunk)
    ]
    return SmallSteps(prompts, decodes + [_decodes(count, length, tokens, many_keys) for count in sizes(held)])


def _decodes(count: int, length: int, tokens: list[list[int]], pages: list[list[int]]) -> StepPlan:
    """Returns a step of ``count`` sequences that decode a token each, which is their ``length``-th."""
    return StepPlan(
        tuple(
            SequenceStep(
                seq,
                tokens[seq][length - 1 : length],
                length - 1,
                pages[seq],
                SampleSpec(GREEDY, 0, length, tokens[seq][:length], 1),
            )
            for seq in range(count)
        )
    )


def measured(run: Run, plans: Sequence[StepPlan]) -> WayFigures:
    """Runs each plan a few times; returns what it came to."""
    seconds, tokens = [], []
    for plan in plans:
        runs = [run(plan) for _ in range(RUNS + REPEATS)]
        seconds.append(median(taken for taken, _ in runs[RUNS:]))
        tokens.append(tuple(token for _, found in runs for token in found))
    return WayFigures(tuple(seconds), tuple(tokens))


def chosen(graph: WayFigures, mega: WayFigures) -> StepChoice:
    """Returns the choice between what both ways came to, for the same plans."""
    if min(map(min, graph.tokens)) < 0:
        return StepChoice(False, "the graph chose no token, so there is nothing to compare with")
    if graph.tokens != mega.tokens:
        return StepChoice(False, "the megakernel chose other tokens")
    by_graph, by_mega = (1e6 * sum(way.seconds) for way in (graph, mega))
    said = f"{len(graph.seconds)} steps took {by_graph:.0f} us by graph and {by_mega:.0f} us by the megakernel"
    return StepChoice(by_mega < by_graph, said)
