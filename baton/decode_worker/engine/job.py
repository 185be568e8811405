"""A sequence that a decode engine generates: its pages, its chain of hashes, and its share of a step. Torch-free.

Knows nothing of who else is in the step, of leases' ids or of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.decode_worker.engine.swap import SwapEntry
from baton.engine.plan import DraftBranch, SampledToken, SequenceStep
from baton.engine.request_checks import blocks_for, holdable_of
from baton.engine.sequence import SequenceState
from baton.engine.speculate.draft import Draft
from baton.engine.states import SequenceStates
from baton.kv.layout.prefix import Chain
from baton.kv.layout.running import RunningScores
from baton.kv.layout.selection import MOST_TOKENS, PromptSelection
from baton.kv.pages.pool import PageLease
from baton.protos.nouns import TokenRun


class DecodeJob:
    """A sequence that this engine generates, with its pages and hash chain. ``age`` is its order of admission."""

    def __init__(
        self,
        sequence: SequenceState,
        root: bytes,
        pages: PageLease,
        age: int,
        states: SequenceStates | None = None,
        kept: PromptSelection | None = None,
        running: RunningScores | None = None,
    ):
        self.sequence = sequence
        self.kept = kept  # what its tokens choose of the prompt, where that isn't all of it
        self.running = running  # by which the answer gives up pages, where it does
        self._findable = self._findable_tokens(pages)
        self.pages, self.states = pages, states
        self.age = age
        self.chain = Chain(root, sequence.tokens, pages.block_tokens)
        self.sealed = pages.held
        self.swap_entry: SwapEntry | None = None
        self._size, self._prompt = pages.block_tokens, len(sequence.request.token_ids)
        sequence.computed = pages.held * self._size

    def advance(self, tokens: int) -> None:
        """Counts ``tokens`` more as having KV, and makes blocks that are now full findable in the prefix cache."""
        self.sequence.computed += tokens
        full = min(self.sequence.computed, self._findable) // self._size
        if full > self.sealed:
            self.pages.seal_run(self.sealed, self.chain.hashes[self.sealed : full])
            self.sealed = full
        self.pages.slide(self.sequence.computed)

    def choose(self, scores: Sequence[float]) -> None:
        """Keeps the blocks with the highest ``scores``, to which the prompt's end attends most; frees the others'
        pages.
        """
        assert self.kept is not None, "all of the prompt is kept"
        self.pages.select(self.kept.chosen(scores), self.kept.first)

    def weigh(self, paid: NDArray[np.float32]) -> None:
        """Adds what the step's tokens ``paid`` to pages, and gives up the one with the least, if one is due."""
        assert self.running is not None, "its answer keeps all pages"
        self.running.add(paid)
        kept = self.running.kept_at(self.sequence.computed)
        if kept is not None:
            self.pages.select(kept, self.running.first)

    def cut(self, start: int, end: int) -> int:
        """Returns the position at which a step from ``start`` that could extend to ``end`` has to stop for pages to
        be selected.
        """
        end = end if self.kept is None else self.kept.cut(start, end)
        return end if self.running is None else self.running.cut(start, end)

    def _findable_tokens(self, pages: PageLease) -> int:
        """Returns how many leading tokens' blocks others may find in the cache: of a prompt with selected blocks at
        most it.
        """
        if self.kept is None:
            return MOST_TOKENS if self.running is None else self.running.prompt
        return 0 if pages.hollow else self.kept.tokens

    @property
    def gap(self) -> tuple[int, int]:
        """Returns the range of blocks that later tokens don't see, because others were selected; (0, 0) for
        none.
        """
        return (0, 0) if self.kept is None and self.running is None else self.pages.gap

    @property
    def holdable(self) -> int:
        """Returns how many leading blocks may be taken from the prefix cache."""
        limit = holdable_of(self.sequence.request, len(self.sequence.tokens), self._size)
        if self.running is not None:  # another prompt's blocks of the answer have no scores of its own
            limit = min(limit, self.running.prompt // self._size)
        return limit if self.kept is None else min(limit, self.kept.first)

    def keep_state(self) -> None:
        """Makes the recurrent state that a step wrote the one after the computed tokens."""
        if self.states is not None:
            rolling = self.sequence.computed >= self._prompt
            self.states.advance(self.sequence.computed, *self.state_terms, rolling=rolling)

    @property
    def state_terms(self) -> tuple[int, int, Callable[[int], bytes]]:
        """Returns the prompt's tokens, the tokens of a block, and a function from block index to hash, for its
        states.
        """
        return self._prompt, self._size, self.chain.hashes.__getitem__

    def take(self, chosen: Sequence[SampledToken], drafts: int = 0) -> TokenRun:
        """Appends the sampled tokens to the sequence; returns them as the run to report, cut at the answer's end.

        All but the last of ``chosen`` are accepted drafts, whose KV exists; ``drafts`` were verified.
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
        """Makes the KV up to ``row`` of a step the sequence's own, also if it lies in a draft branch's pages."""
        for draft_branch in step.draft_branches:
            if draft_branch.first <= row < draft_branch.first + draft_branch.rows:
                self.pages.graft(step.start // self._size, draft_branch.pages)

    def give_back(self) -> None:
        """Frees the pages that only rejected drafts needed."""
        self.pages.prune()
        needed = blocks_for(len(self.sequence.tokens), self._size)
        if len(self.pages.pages) > needed:
            self.pages.shrink(needed)

    def close(self) -> None:
        """Returns all of the job's pages to the pool."""
        self.pages.close()
        if self.states is not None:
            self.states.close()
            self.states = None

    def restart(self, pages: PageLease, states: SequenceStates | None = None) -> None:
        """Begins the sequence again on new pages, after the blocks that were found in the cache."""
        self.pages, self.sealed, self.states = pages, pages.held, states
        self.running = None if self.running is None else self.running.fresh()
        self._findable = self._findable_tokens(pages)
        pages.hinted_blocks = self.sequence.request.hinted_blocks(pages.block_tokens)
        self.sequence.computed = pages.held * pages.block_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Returns the job's sort key in the batch, (priority, age); lower comes first."""
        return self.sequence.request.priority, self.age

    @property
    def prefilling(self) -> bool:
        """Returns whether prompt tokens are to be computed or, after a preemption, all tokens again."""
        computed = self.sequence.computed
        return len(self.sequence.tokens) - computed > 1 or computed < self._prompt


Share = tuple[DecodeJob, int, bool]  # who, how many tokens, whether they are a prompt's


def step_of(
    job: DecodeJob,
    take: int,
    prefilling: bool,
    draft: Draft | None = None,
    draft_branches: tuple[DraftBranch, ...] = (),
    rejects: bool = False,
) -> SequenceStep:
    """Returns the runner's step for ``take`` tokens of ``job``; with ``rejects``, drafts are judged by rejection.

    ``prefilling`` says that the tokens are a prompt's; ``draft`` holds the tokens to verify,
    ``draft_branches`` the pages of its branches.
    """
    if job.states is None:
        step = _plain_step(job, take, prefilling, draft, draft_branches)
        step = step if job.kept is None and job.running is None else _choosing(step, job)
        return _by_rejection(step, draft) if draft is not None and rejects else step
    assert draft is None, "a state isn't rolled back: nothing is drafted"
    states = job.states.source, job.states.target
    return msgspec.structs.replace(_plain_step(job, take, prefilling), state_from=states[0], state_to=states[1])


def _choosing(step: SequenceStep, job: DecodeJob) -> SequenceStep:
    """Returns ``step`` for a sequence with selected blocks, or one that selects them."""
    if job.running is not None and job.running.sees(step.start):
        return msgspec.structs.replace(step, gap=job.gap, watch=step.start, watch_rows=True)
    watch = None if job.kept is None else job.kept.watched_in(step.start, step.start + len(step.tokens))
    return msgspec.structs.replace(step, gap=job.gap, watch=watch)


def _by_rejection(step: SequenceStep, draft: Draft) -> SequenceStep:
    """Returns ``step`` with each draft judged by rejection; greedy drafts are accepted if they are the likeliest
    anyway.
    """
    if step.sample is None or not step.sample.sampling.temperature:
        return step
    asks = enumerate(step.asks[: len(step.verify)])
    judged = [msgspec.structs.replace(spec, drafted=draft.judged(at)) for at, spec in asks]
    return msgspec.structs.replace(step, sample=judged[0], verify=(*judged[1:], step.verify[-1]))


def _plain_step(
    job: DecodeJob,
    take: int,
    prefilling: bool,
    draft: Draft | None = None,
    draft_branches: tuple[DraftBranch, ...] = (),
) -> SequenceStep:
    sequence, pages = job.sequence, job.pages.pages
    start, end = sequence.computed, sequence.computed + take
    tokens = sequence.tokens[start:end]
    sample = sequence.sample_spec() if end == len(sequence.tokens) else None
    adapter = sequence.request.adapter_id
    if draft is not None:
        specs = sequence.verify_specs(draft.paths())
        drafted = [*tokens, *draft.tokens]
        of = drafted, start, pages, sample
        return SequenceStep(
            sequence.seq, *of, verify=specs, adapter=adapter, draft_branches=draft_branches, tables=job.pages.tables
        )
    if not prefilling:
        return SequenceStep(sequence.seq, tokens, start, pages, sample, adapter=adapter, tables=job.pages.tables)
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
        tables=job.pages.tables,
    )
