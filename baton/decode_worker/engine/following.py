"""Plans a decode step behind one whose results aren't known yet. Torch-free and pure but for the pages it leases.

Knows nothing of runners, of time or of what becomes of the step. No sequence is changed: what it will have is its
present state and its item in the step that runs. Either every sequence of that step goes on in this one, or is
certain to end with it, or there is no plan. So batches are those of steps planned one after another, and no answer
is served in every second step because the others needn't wait.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.decode_worker.engine.job import DecodeJob
from baton.decode_worker.engine.scheduler import DecodeScheduler
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.request_checks import blocks_for
from baton.protos.errors import PoolExhausted

UNKNOWN = 0  # in place of a token that the step before chooses


class Following(NamedTuple):
    """Holds a step behind another, and the sequences in it whose one token that one chooses."""

    plan: StepPlan
    fed: frozenset[int]


class NextRow(NamedTuple):
    """Says where a sequence stands behind the step that runs: how many of its tokens have KV, and, where its next
    token is yet to be known, how to choose the one after it.
    """

    computed: int
    spec: SampleSpec | None = None


def following(scheduler: DecodeScheduler, running: StepPlan) -> Following | None:
    """Returns the step behind ``running``; None if it can't be planned yet, or has nothing to compute.

    Leases the pages that its sequences lack, and preempts nobody.
    """
    if scheduler.waiting:
        return None
    current = {item.seq: item for item in running.items}
    (writers, budget), items, fed = scheduler.limits(), list[SequenceStep](), set[int]()
    for job in scheduler.running:
        if len(items) == scheduler.max_batch:
            break
        sequence, item = job.sequence, current.get(job.sequence.seq)
        if not _plain(job, item):
            return None
        if item is not None and item.sample is not None and sequence.ends_next and not sequence.has_grammar:
            continue
        place = _place(job, item)
        if place is None:
            return None
        pending = len(sequence.tokens) - place.computed
        prefilling = place.spec is None and (pending > 1 or place.computed < len(sequence.request.token_ids))
        known = pending - (place.spec is None and not sequence.ready)  # the last token waits for its grammar
        take = min(known, max(0, budget)) if prefilling else 1
        waits = take == pending > known
        if take == 0 or waits or (not prefilling and writers == 0):
            continue
        if not _reached(job, place.computed + take):
            return None
        items.append(_step(job, place, take, prefilling))
        fed |= {sequence.seq} if place.spec is not None else set()
        budget -= take if prefilling else 0
        writers -= not prefilling
    return Following(StepPlan(tuple(items)), frozenset(fed)) if items else None


def _plain(job: DecodeJob, item: SequenceStep | None) -> bool:
    """Returns whether the sequence's next step depends on nothing but tokens, and on no drafts in ``item``."""
    own = job.states is None and job.kept is None and job.running is None and not job.pages.tables
    asks = job.sequence.scores_prompt or job.sequence.pools
    return own and not asks and (item is None or not item.verify)


def _place(job: DecodeJob, item: SequenceStep | None) -> NextRow | None:
    """Returns where the sequence stands behind ``item``; None if how to go on depends on the token that it
    chooses.
    """
    if item is None:
        return NextRow(job.sequence.computed)
    computed = item.start + len(item.tokens)
    if item.sample is None:
        return NextRow(computed)
    spec = job.sequence.spec_after_next()
    return None if spec is None else NextRow(computed, spec)


def _reached(job: DecodeJob, tokens: int) -> bool:
    """Leases pages for ``tokens`` tokens of the sequence; returns False if there are too few."""
    try:
        job.pages.reach(blocks_for(tokens, job.pages.block_tokens))
    except PoolExhausted:
        return False
    return True


def _step(job: DecodeJob, place: NextRow, take: int, prefilling: bool) -> SequenceStep:
    sequence, start = job.sequence, place.computed
    adapter = sequence.request.adapter_id
    if place.spec is not None:
        return SequenceStep(sequence.seq, [UNKNOWN], start, job.pages.pages, place.spec, adapter=adapter)
    tokens = sequence.tokens[start : start + take]
    sample = sequence.sample_spec() if start + take == len(sequence.tokens) else None
    of = job.pages.pages, sample, prefilling
    return SequenceStep(sequence.seq, tokens, start, *of, adapter=adapter)
