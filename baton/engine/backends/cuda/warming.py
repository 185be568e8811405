"""Plans the steps that a CUDA session runs before traffic, so that no graph is captured or dropped in its midst.

Knows nothing of sessions or devices. A graph holds addresses of workspaces, and a workspace that grows drops all
graphs: so the largest step comes first, padded as one of its size is in traffic. The one with most logits comes
next, launch by launch where the runner can, because a second run of that size would be captured in vain. Then comes
each size of decodes twice, of which the second one is captured.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.plan import MOST_SCORED, SampleSpec, SequenceStep, StepPlan
from baton.protos.nouns import BLOCK_TOKENS, Sampling

RUNS = 2  # of each size: by launches, then captured (session.cuh)
MOST_HISTORY = 1 << 22  # tokens of all histories of the largest step, 16 MB of a plan
GREEDY = Sampling(temperature=0.0)
LOUD = Sampling(temperature=0.0, logprobs=0)  # its logits come back to the host
PENALISED = Sampling(temperature=0.0, repetition_penalty=1.1)  # its history goes over with the plan


def bucket(count: int) -> int:
    """Returns the size that has a graph for ``count`` sequences, as staging.cuh has it."""
    if count <= 2:
        return count
    if count <= 8:
        return 4 if count <= 4 else 8
    step = 8 if count <= 64 else 16 if count <= 128 else 32
    return -(-count // step) * step


def sizes(sequences: int) -> list[int]:
    """Returns the numbers of decodes with a graph of their own, up to ``sequences``, the largest first."""
    return sorted({min(bucket(count), sequences) for count in range(1, sequences + 1)}, reverse=True)


def largest_step(sequences: int, chunk: int, pages: int, context: int, drafts: int = 0) -> StepPlan:
    """Returns a step of ``sequences`` decodes, each with a mask and a history, of ``drafts`` drafts of theirs, each
    with a mask, and of a prompt's ``chunk`` tokens, as many of which as may be get logprobs.

    There are ``pages`` pages, and positions up to ``context``; the step takes fewer rows if pages are few.
    """
    rows = max(1, min(chunk, context, pages * BLOCK_TOKENS))
    needed = list(range(-(-rows // BLOCK_TOKENS)))
    history = [0] * max(1, min(context, MOST_HISTORY // sequences))
    most = min(BLOCK_TOKENS, context) - 1  # of a sequence's drafts, which are in its one page
    drafted = [min(most, max(0, drafts - most * seq)) for seq in range(sequences)]
    decodes = [
        _decode(seq, pages, SampleSpec(PENALISED, 0, 1, history, 1, (), _all), count)
        for seq, count in enumerate(drafted)
    ]
    scored = (0,) * min(rows, MOST_SCORED)
    return StepPlan((*decodes, SequenceStep(sequences, [0] * rows, 0, needed, targets=scored)))


def loudest_step(sequences: int, chunk: int, pages: int, context: int, drafts: int = 0) -> StepPlan:
    """Returns the largest step with logits of as many rows as may be asked for at once: each decode and draft has
    logprobs, beside those of the prompt.
    """
    largest = largest_step(sequences, chunk, pages, context, drafts)
    *decodes, prompt = largest.items
    loud = [
        msgspec.structs.replace(
            item,
            sample=SampleSpec(LOUD, 0, 1, [0], 1),
            verify=tuple(SampleSpec(LOUD, 0, 2 + at, (), 1) for at in range(len(item.verify))),
        )
        for item in decodes
    ]
    return StepPlan((*loud, prompt))


def decodes(count: int, pages: int) -> StepPlan:
    """Returns a step of ``count`` sequences that decode their first token each."""
    return StepPlan(tuple(_decode(seq, pages, SampleSpec(GREEDY, 0, 1, [0], 1)) for seq in range(count)))


def captured_steps(sequences: int, pages: int) -> Iterator[StepPlan]:
    """Yields each size of up to ``sequences`` decodes, as often as it takes to capture it."""
    for count in sizes(sequences):
        for _ in range(RUNS):
            yield decodes(count, pages)


def warm_steps(sequences: int, chunk: int, pages: int, context: int, drafts: int = 0) -> Iterator[StepPlan]:
    """Yields the steps of ranks on cards in their order. A rank's card gives back the logits of all sampled rows,
    so that to it the loudest step is the largest one: run twice, it would be captured in vain.
    """
    yield largest_step(sequences, chunk, pages, context, drafts)
    yield from captured_steps(sequences, pages)


def _decode(seq: int, pages: int, spec: SampleSpec, drafts: int = 0) -> SequenceStep:
    after = tuple(SampleSpec(GREEDY, 0, 2 + at, (), 1, (), _all) for at in range(drafts))
    return SequenceStep(seq, [0] * (1 + drafts), 0, [seq % pages], spec, verify=after)


def _all(vocab: int) -> NDArray[np.bool_]:
    return np.ones(vocab, np.bool_)
