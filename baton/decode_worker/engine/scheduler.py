"""Who advances in a decode step: continuous batching, prompts in chunks, growth, preemption. Torch-free and pure.

Knows nothing of leases' ids, handoffs, channels or time. Order is by priority (lower first), then age. The first
sequence is never preempted; a preempted one gives its pages back. Its KV is set aside in host memory where that was
measured to be cheaper (swap.py), else computed again from its tokens; what stayed in the cache is found either way.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

import msgspec

from baton.decode_worker.engine.budget import StepBudget
from baton.decode_worker.engine.swap import SwapArea, SwapEntry
from baton.engine.checks import blocks_for, holdable_of
from baton.engine.plan import SampledToken, SequenceStep, StepPlan
from baton.engine.sequence import SequenceState
from baton.engine.speculate.draft import Draft
from baton.engine.speculate.drafter import Drafter
from baton.engine.states import SequenceStates, Sight, StateRules, opened
from baton.kv.layout.prefix import Chain
from baton.kv.pages.pool import PageLease, PagePool
from baton.protos.errors import PoolExhausted
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
    ):
        self.sequence = sequence
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
        full = self.sequence.computed // self._size
        if full > self.sealed:
            self.pages.seal_run(self.sealed, self.chain.hashes[self.sealed : full])
            self.sealed = full
        self.pages.slide(self.sequence.computed)

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

    def give_back(self) -> None:
        """Gives back pages that only rejected drafts needed."""
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


class DecodeScheduler:
    """``running`` sequences hold pages, in order; ``waiting`` ones were preempted."""

    def __init__(
        self,
        pool: PagePool,
        max_batch: int,
        chunk_tokens: int,
        budget: StepBudget | None = None,
        swap: SwapArea | None = None,
        drafter: Drafter | None = None,
        rules: StateRules | None = None,
        sight: Sight = Sight(),
    ):
        self.pool, self.rules, self.sight = pool, rules, sight
        self.drafter = drafter
        self.drafts: dict[int, Draft] = {}  # that the last plan verifies, by sequence
        self.budget = budget or StepBudget()
        self.swap = swap
        self.max_batch = max_batch
        self.chunk_tokens = chunk_tokens
        self.running: list[DecodeJob] = []
        self.waiting: list[DecodeJob] = []
        self.preemptions = 0

    @property
    def only_writes(self) -> bool:
        """Tells whether there are answers to write, and no prompt to read."""
        return bool(self.running) and not any(job.reading for job in self.running)

    @property
    def growth_reserve(self) -> int:
        """Returns the pages that a newcomer must leave, because each running sequence will soon ask for one."""
        return min(len(self.running), self.pool.pages // 8)

    def add(self, job: DecodeJob) -> None:
        """Adds a job to the batch, in order."""
        insort(self.running, job, key=lambda d: d.rank)

    def remove(self, job: DecodeJob) -> None:
        """Removes a job, in whatever state; its pages go back."""
        for members in (self.running, self.waiting):
            if job in members:
                members.remove(job)
        job.close()
        if self.swap is not None and job.swap_entry is not None:
            self.swap.drop(job.swap_entry)
            job.swap_entry = None

    def plan(self) -> StepPlan:
        """Returns the next step: a token and drafts for each sequence that writes, chunks for those that read."""
        if self.waiting:
            self._resume()
        shares = self._shares()
        if self.drafter is None:
            return StepPlan(tuple([_step(*share) for share in shares]))
        self.drafts = self._drafts(self.drafter, shares)
        if not self.drafts:
            return StepPlan(tuple([_step(*share) for share in shares]))
        rejects = self.drafter.by_rejection
        return StepPlan(tuple([_step(*share, self.drafts.get(share[0].sequence.seq), rejects) for share in shares]))

    def _shares(self) -> list[Share]:
        """Who is in the step, in order; their pages are there."""
        shares: list[Share] = []
        (writers, budget), running, at = self._limits(), self.running, 0
        while at < len(running) and len(shares) < self.max_batch:  # who is preempted meanwhile comes after ``at``
            job = running[at]
            at += 1
            sequence = job.sequence
            reading, pending = job.reading, len(sequence.tokens) - sequence.computed
            if not reading and writers == 0:
                continue
            take = self._whole(job, min(pending, budget)) if reading else 1
            waits = take == pending and not sequence.ready
            if take == 0 or waits or not self._grow(job, take):
                continue
            shares.append((job, take, reading))
            budget -= take if reading else 0
            writers -= not reading
        return shares

    def _whole(self, job: DecodeJob, take: int) -> int:
        """``take`` tokens of a prompt, or fewer, so that the state at a boundary isn't stepped over."""
        if self.rules is None:
            return take
        start, prompt = job.sequence.computed, len(job.sequence.request.token_ids)
        return self.rules.cut(start, start + take, prompt, self.pool.block_tokens) - start

    def _drafts(self, drafter: Drafter, shares: list[Share]) -> dict[int, Draft]:
        sequences = [job.sequence for job, _, reading in shares if not reading]
        if not sequences:
            return {}
        prompt_tokens = 0 if len(sequences) == len(shares) else sum(take for _, take, reading in shares if reading)
        found = drafter.plan(sequences, prompt_tokens, self.budget.limit_s)
        if not found:
            return {}
        writers = {job.sequence.seq: job for job, _, reading in shares if not reading}
        fitting = {seq: self._fitting(writers[seq], draft) for seq, draft in found.items()}
        return {seq: draft for seq, draft in fitting.items() if draft.tokens}

    def _fitting(self, job: DecodeJob, draft: Draft) -> Draft:
        """Returns as much of the draft as free pages allow, without taking pages from another sequence."""
        end, size = job.sequence.computed + 1, self.pool.block_tokens
        short = blocks_for(end + len(draft.tokens), size) - len(job.pages.pages)
        if short > 0:
            try:
                job.pages.extend(short, self.growth_reserve)
            except PoolExhausted:
                return draft._replace(tokens=draft.tokens[: len(job.pages.pages) * size - end])
        return draft

    def starved(self) -> DecodeJob | None:
        """Returns, after an empty plan, the oldest sequence, which found no page; None while a grammar compiles."""
        if any(not job.sequence.ready for job in self.running):
            return None
        return next(iter(self.running or self.waiting), None)

    def _limits(self) -> tuple[int, int]:
        """How many answers this step advances, and how many prompt tokens it reads, within the step's budget."""
        if not self.budget.limits:
            return self.max_batch, self.chunk_tokens
        writing = [d.sequence.computed + 1 for d in self.running if not d.reading]
        writers = self.budget.batch(writing, self.max_batch)
        first = next((d for d in self.running if d.reading), None)
        if first is None:
            return writers, self.chunk_tokens
        beside = writing[:writers]
        return writers, self.budget.chunk(self.chunk_tokens, first.sequence.computed, len(beside), sum(beside))

    def _resume(self) -> None:
        while self.waiting:
            job = self.waiting[0]
            tokens, size = len(job.sequence.tokens), self.pool.block_tokens
            limit, aside = holdable_of(job.sequence.request, tokens, size), job.swap_entry
            if self.rules is not None and aside is not None:
                limit = min(limit, aside.tokens // size)
            asked = job.chain.hashes, blocks_for(tokens, size), limit, self.growth_reserve
            try:
                brought = aside is not None
                pages, states = opened(self.pool, self.rules, *asked, brought=brought, sight=self.sight)
            except PoolExhausted:
                return
            job.restart(pages, states)
            self._swap_in(job)
            self.add(self.waiting.pop(0))

    def _swap_in(self, job: DecodeJob) -> None:
        """Copies the pages that were set aside into the new ones, which spares computing their tokens again."""
        swap_entry, job.swap_entry = job.swap_entry, None
        if self.swap is None or swap_entry is None:
            return
        state = () if job.states is None else job.states.landing().pages
        self.swap.restore(swap_entry, job.pages.pages, job.pages.held, state)
        job.advance(max(0, swap_entry.tokens - job.sequence.computed))
        if job.states is not None:
            job.states.landed(job.sequence.computed, *job.state_terms)

    def _grow(self, job: DecodeJob, take: int) -> bool:
        """Pages for ``take`` more tokens, preempting the last; False when ``decoding`` must wait itself."""
        tokens, size, held = job.sequence.computed + take, self.pool.block_tokens, len(job.pages.pages)
        if tokens <= held * size:
            return True
        short = blocks_for(tokens, size) - held
        while short > 0:
            try:
                job.pages.extend(short)
                return True
            except PoolExhausted:
                victim = self.running[-1]
                if victim is self.running[0]:
                    return False
                self._preempt(victim)
                if victim is job:
                    return False
        return True

    def _preempt(self, job: DecodeJob) -> None:
        self.running.remove(job)
        if self.swap is not None and not job.pages.hollow:
            state = () if job.states is None else job.states.source or ()
            job.swap_entry = self.swap.save(job.pages.pages, job.sequence.computed, state)
        job.close()
        job.sequence.computed = 0
        insort(self.waiting, job, key=lambda d: d.rank)
        self.preemptions += 1


def _step(
    job: DecodeJob, take: int, reading: bool, draft: Draft | None = None, rejects: bool = False
) -> SequenceStep:
    if job.states is None:
        step = _plain_step(job, take, reading, draft)
        return _by_rejection(step, draft) if draft is not None and rejects else step
    assert draft is None, "a state isn't rolled back: nothing is drafted"
    states = job.states.source, job.states.target
    return msgspec.structs.replace(_plain_step(job, take, reading), state_from=states[0], state_to=states[1])


def _by_rejection(step: SequenceStep, draft: Draft) -> SequenceStep:
    """The step with each draft judged by rejection; greedy ones stand by being the likeliest either way."""
    if step.sample is None or not step.sample.sampling.temperature:
        return step
    asks = enumerate(step.asks[: len(step.verify)])
    judged = [msgspec.structs.replace(spec, drafted=draft.judged(at)) for at, spec in asks]
    return msgspec.structs.replace(step, sample=judged[0], verify=(*judged[1:], step.verify[-1]))


def _plain_step(job: DecodeJob, take: int, reading: bool, draft: Draft | None = None) -> SequenceStep:
    sequence, pages = job.sequence, job.pages.pages
    start, end = sequence.computed, sequence.computed + take
    tokens = sequence.tokens[start:end]
    sample = sequence.sample_spec() if end == len(sequence.tokens) else None
    adapter = sequence.request.adapter_id
    if draft is not None:
        specs = sequence.verify_specs(draft.tokens)
        drafted = [*tokens, *draft.tokens]
        return SequenceStep(sequence.seq, drafted, start, pages, sample, verify=specs, adapter=adapter)
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
