"""A sequence that a decode engine writes: its pages, its chain of hashes, and its share of a step. Torch-free.

Knows nothing of who else is in the step, of leases' ids or of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from baton.decode_worker.engine.swap import SwapEntry
from baton.engine.checks import blocks_for, holdable_of
from baton.engine.plan import Limb, SampledToken, SequenceStep
from baton.engine.sequence import SequenceState
from baton.engine.speculate.draft import Draft
from baton.engine.states import SequenceStates
from baton.kv.layout.prefix import Chain
from baton.kv.layout.selection import MOST_TOKENS, KeptPrompt
from baton.kv.pages.pool import PageLease
from baton.protos.nouns import TokenRun


class DecodeJob:
    """Holds a sequence that is written here, its pages and its chain. ``age`` is its order of admission."""

    def __init__(
        self,
        sequence: SequenceState,
        root: bytes,
        pages: PageLease,
        age: int,
        states: SequenceStates | None = None,
        kept: KeptPrompt | None = None,
    ):
        self.sequence = sequence
        self.kept = kept  # what its tokens choose of the prompt, where that isn't all of it
        self._findable = self._findable_tokens(pages)
        self.pages, self.states = pages, states
        self.age = age
        self.chain = Chain(root, sequence.tokens, pages.block_tokens)
        self.sealed = pages.held
        self.swap_entry: SwapEntry | None = None
        self._size, self._prompt = pages.block_tokens, len(sequence.request.token_ids)
        sequence.computed = pages.held * self._size

    def advance(self, tokens: int) -> None:
        """Counts ``tokens`` more as having their KV; blocks that are full now become findable."""
        self.sequence.computed += tokens
        full = min(self.sequence.computed, self._findable) // self._size
        if full > self.sealed:
            self.pages.seal_run(self.sealed, self.chain.hashes[self.sealed : full])
            self.sealed = full
        self.pages.slide(self.sequence.computed)

    def choose(self, scores: Sequence[float]) -> None:
        """Keeps the blocks that the prompt's end attends to most; the others' pages go back."""
        assert self.kept is not None, "all of the prompt is kept"
        self.pages.select(self.kept.chosen(scores), self.kept.first)

    def _findable_tokens(self, pages: PageLease) -> int:
        """The tokens whose blocks others may find: where some are chosen, the prompt's, and none that came so."""
        if self.kept is None:
            return MOST_TOKENS
        return 0 if pages.hollow else self.kept.tokens

    @property
    def gap(self) -> tuple[int, int]:
        """Returns the blocks that its tokens to come don't see since others were chosen."""
        return (0, 0) if self.kept is None else self.pages.gap

    @property
    def holdable(self) -> int:
        """Returns how many leading blocks of it may be taken from a cache."""
        limit = holdable_of(self.sequence.request, len(self.sequence.tokens), self._size)
        return limit if self.kept is None else min(limit, self.kept.first)

    def keep_state(self) -> None:
        """Takes the state that a step wrote as the one after the computed tokens."""
        if self.states is not None:
            rolling = self.sequence.computed >= self._prompt
            self.states.advance(self.sequence.computed, *self.state_terms, rolling=rolling)

    @property
    def state_terms(self) -> tuple[int, int, Callable[[int], bytes]]:
        """Returns what its states must know of it: the prompt's tokens, those of a block, and blocks' hashes."""
        return self._prompt, self._size, self.chain.hashes.__getitem__

    def take(self, chosen: Sequence[SampledToken], drafts: int = 0) -> TokenRun:
        """Joins the model's next tokens to the sequence; returns what is told of them.

        All but the last of ``chosen`` are accepted drafts, of ``drafts`` that were verified: their KV is there.
        What follows the answer's end is left out.
        """
        sequence, index, accepted = self.sequence, self.sequence.outputs, len(chosen) - 1
        for count, one in enumerate(chosen, 1):
            sequence.take(one.token_id)
            self.chain.append(one.token_id)
            if sequence.finish_reason:
                chosen, accepted = chosen[:count], min(count, accepted)
                break
            if count <= accepted:
                self.advance(1)
        return TokenRun(
            output_index=index,
            token_ids=tuple([one.token_id for one in chosen]),
            logprobs=tuple([one.logprobs for one in chosen if one.logprobs is not None]),
            finish_reason=sequence.finish_reason,
            stop_token_id=sequence.stop_token_id,
            accepted_drafts=accepted,
            rejected_drafts=drafts - accepted,
        )

    def settle(self, step: SequenceStep, row: int) -> None:
        """Takes the KV up to ``row`` of a step that ran as the sequence's own: a branch's lies in its own pages."""
        for limb in step.limbs:
            if limb.first <= row < limb.first + limb.rows:
                self.pages.graft(step.start // self._size, limb.pages)

    def give_back(self) -> None:
        """Gives back pages that only rejected drafts needed."""
        self.pages.prune()
        needed = blocks_for(len(self.sequence.tokens), self._size)
        if len(self.pages.pages) > needed:
            self.pages.shrink(needed)

    def close(self) -> None:
        """Gives all of its pages back."""
        self.pages.close()
        if self.states is not None:
            self.states.close()
            self.states = None

    def restart(self, pages: PageLease, states: SequenceStates | None = None) -> None:
        """Begins again on new pages, after the blocks that were found."""
        self.pages, self.sealed, self.states = pages, pages.held, states
        self._findable = self._findable_tokens(pages)
        pages.hinted = self.sequence.request.retained
        self.sequence.computed = pages.held * pages.block_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Returns its place in the order: less is sooner."""
        return self.sequence.request.priority, self.age

    @property
    def reading(self) -> bool:
        """Tells whether more than the next token's KV is missing: a prompt's, or after a preemption all of it."""
        computed = self.sequence.computed
        return len(self.sequence.tokens) - computed > 1 or computed < self._prompt


Share = tuple[DecodeJob, int, bool]  # who, how many tokens, whether they are a prompt's


def step_of(
    job: DecodeJob,
    take: int,
    reading: bool,
    draft: Draft | None = None,
    limbs: tuple[Limb, ...] = (),
    rejects: bool = False,
) -> SequenceStep:
    """Returns a share as the runner computes it; where a draft ``rejects``, its tokens are judged by rejection."""
    if job.states is None:
        step = _plain_step(job, take, reading, draft, limbs)
        step = step if job.kept is None else _choosing(step, job, job.kept)
        return _by_rejection(step, draft) if draft is not None and rejects else step
    assert draft is None, "a state isn't rolled back: nothing is drafted"
    states = job.states.source, job.states.target
    return msgspec.structs.replace(_plain_step(job, take, reading), state_from=states[0], state_to=states[1])


def _choosing(step: SequenceStep, job: DecodeJob, kept: KeptPrompt) -> SequenceStep:
    """The step of a sequence that sees what was chosen of its prompt, or chooses it."""
    watch = kept.watched_in(step.start, step.start + len(step.tokens))
    return msgspec.structs.replace(step, gap=job.gap, watch=watch)


def _by_rejection(step: SequenceStep, draft: Draft) -> SequenceStep:
    """The step with each draft judged by rejection; greedy ones stand by being the likeliest either way."""
    if step.sample is None or not step.sample.sampling.temperature:
        return step
    asks = enumerate(step.asks[: len(step.verify)])
    judged = [msgspec.structs.replace(spec, drafted=draft.judged(at)) for at, spec in asks]
    return msgspec.structs.replace(step, sample=judged[0], verify=(*judged[1:], step.verify[-1]))


def _plain_step(
    job: DecodeJob, take: int, reading: bool, draft: Draft | None = None, limbs: tuple[Limb, ...] = ()
) -> SequenceStep:
    sequence, pages = job.sequence, job.pages.pages
    start, end = sequence.computed, sequence.computed + take
    tokens = sequence.tokens[start:end]
    sample = sequence.sample_spec() if end == len(sequence.tokens) else None
    adapter = sequence.request.adapter_id
    if draft is not None:
        specs = sequence.verify_specs(draft.paths())
        drafted = [*tokens, *draft.tokens]
        return SequenceStep(sequence.seq, drafted, start, pages, sample, verify=specs, adapter=adapter, limbs=limbs)
    if not reading:
        return SequenceStep(sequence.seq, tokens, start, pages, sample, adapter=adapter)
    return SequenceStep(
        seq=sequence.seq,
        tokens=tokens,
        start=start,
        pages=pages,
        sample=sample,
        is_prefill=True,
        targets=sequence.targets(take),
        pool=sequence.pools,
        score_top=sequence.request.sampling.prompt_logprobs or 0,
        adapter=adapter,
    )
