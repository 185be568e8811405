"""Plans decode steps: continuous batching, prompts in chunks, growth of pages, preemption. Torch-free and pure.

Knows nothing of leases' ids, handoffs, channels or time. Order is by priority (lower first), then age. The first
sequence is never preempted; a preempted one gives its pages back. Its KV is copied to host memory if that was
measured to be cheaper (swap.py), else computed again from its tokens; what stayed in the cache is found either way.
"""

from __future__ import annotations

from bisect import insort
from itertools import islice

from baton.decode_worker.engine.budget import StepBudget
from baton.decode_worker.engine.job import DecodeJob, Share, step_of
from baton.decode_worker.engine.swap import SwapArea
from baton.engine.plan import MOST_SCORED, DraftBranch, StepPlan
from baton.engine.request_checks import blocks_for
from baton.engine.speculate.draft import Draft
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.tree import chains, depths
from baton.engine.states import AttentionReach, StateRules, opened
from baton.kv.pages.pool import PagePool
from baton.protos.errors import PoolExhausted


class DecodeScheduler:
    """The batch of a decode engine: ``running`` sequences hold pages, in order; ``waiting`` ones were preempted."""

    def __init__(
        self,
        pool: PagePool,
        max_batch: int,
        chunk_tokens: int,
        budget: StepBudget | None = None,
        swap: SwapArea | None = None,
        drafter: Drafter | None = None,
        rules: StateRules | None = None,
        reach: AttentionReach = AttentionReach(),
    ):
        self.pool, self.rules, self.reach = pool, rules, reach
        self.drafter = drafter
        self.drafts: dict[int, Draft] = {}  # that the last plan verifies, by sequence
        self._draft_branches: dict[int, tuple[DraftBranch, ...]] = {}  # of those that are trees
        self.budget = budget or StepBudget()
        self.swap = swap
        self.max_batch = max_batch
        self.chunk_tokens = chunk_tokens
        self.running: list[DecodeJob] = []
        self.waiting: list[DecodeJob] = []
        self.preemptions = 0

    @property
    def only_decodes(self) -> bool:
        """Returns whether there are answers to generate, and no prompt to compute."""
        return bool(self.running) and not any(job.prefilling for job in self.running)

    @property
    def growth_reserve(self) -> int:
        """Returns the number of pages to leave free at an admission, because each running sequence will soon need
        one.
        """
        return min(len(self.running) * self.reach.tables, self.pool.pages // 8)

    def add(self, job: DecodeJob) -> None:
        """Inserts a job into the batch by its rank."""
        insort(self.running, job, key=lambda d: d.rank)

    def drop(self, job: DecodeJob) -> None:
        """Removes a job from the batch, whether it runs or waits; its pages stay leased."""
        for members in (self.running, self.waiting):
            if job in members:
                members.remove(job)

    def remove(self, job: DecodeJob) -> None:
        """Removes a job as ``drop`` does, and frees its pages and its copy in host memory."""
        self.drop(job)
        job.close()
        if self.swap is not None and job.swap_entry is not None:
            self.swap.drop(job.swap_entry)
            job.swap_entry = None

    def plan(self) -> StepPlan:
        """Returns the next step: a token and drafts for each sequence that decodes, chunks for those with prompts
        to compute.

        It resumes waiting sequences, leases pages, and preempts sequences if pages run out.
        """
        if self.waiting:
            self._resume()
        shares = self._shares()
        self.drafts = {} if self.drafter is None else self._drafts(self.drafter, shares)
        if self.drafter is None or not self.drafts:
            return StepPlan(tuple([step_of(*share) for share in shares]))
        rejects = self.drafter.by_rejection
        drafted = [(share, share[0].sequence.seq) for share in shares]
        return StepPlan(
            tuple(
                [
                    step_of(*share, self.drafts.get(seq), self._draft_branches.get(seq, ()), rejects)
                    for share, seq in drafted
                ]
            )
        )

    def _shares(self) -> list[Share]:
        """Returns the jobs in the step with their tokens, in order; their pages are leased."""
        shares: list[Share] = []
        (writers, budget), running, at, scored = self.limits(), self.running, 0, MOST_SCORED
        while at < len(running) and len(shares) < self.max_batch:  # who is preempted meanwhile comes after ``at``
            job = running[at]
            at += 1
            sequence = job.sequence
            prefilling, pending = job.prefilling, len(sequence.tokens) - sequence.computed
            if not prefilling and writers == 0:
                continue
            scores = prefilling and sequence.scores_prompt
            most = min(budget, scored) if scores else budget
            known = pending - (not sequence.ready)  # the last token waits until its grammar is compiled
            take = self._whole(job, min(known, max(0, most))) if prefilling else 1
            waits = take == pending > known or (scores and take > scored < MOST_SCORED)
            if take == 0 or waits or not self._grow(job, take):
                continue
            shares.append((job, take, prefilling))
            budget -= take if prefilling else 0
            scored = max(0, scored - take) if scores else scored
            writers -= not prefilling
        return shares

    def _whole(self, job: DecodeJob, take: int) -> int:
        """Returns ``take``, or fewer prompt tokens, so that no state at a block boundary is stepped over.

        Tokens that select what is kept of the prompt are taken together.
        """
        start, prompt = job.sequence.computed, len(job.sequence.request.token_ids)
        if take and not (job.kept is None and job.running is None):
            return job.cut(start, start + take) - start
        if self.rules is None:
            return take
        return self.rules.cut(start, start + take, prompt, self.pool.block_tokens) - start

    def _drafts(self, drafter: Drafter, shares: list[Share]) -> dict[int, Draft]:
        sequences = [job.sequence for job, _, prefilling in shares if not prefilling and job.running is None]
        if not sequences:
            return {}
        prompt_tokens = (
            0 if len(sequences) == len(shares) else sum(take for _, take, prefilling in shares if prefilling)
        )
        found, self._draft_branches = drafter.plan(sequences, prompt_tokens, self.budget.limit_s), {}
        if not found:
            return {}
        writers = {job.sequence.seq: job for job, _, prefilling in shares if not prefilling}
        fitting = {seq: self._fitting(writers[seq], draft) for seq, draft in found.items()}
        return {seq: draft for seq, draft in fitting.items() if draft.tokens}

    def _fitting(self, job: DecodeJob, draft: Draft) -> Draft:
        """Returns as much of the draft as free pages allow, without taking pages from another sequence; with a
        grammar, its first chain.
        """
        draft = draft.chain() if job.sequence.has_grammar else draft
        end, size = job.sequence.computed + 1, self.pool.block_tokens
        chain = draft.chain().tokens
        try:
            job.pages.reach(blocks_for(end + len(chain), size), self.growth_reserve)
        except PoolExhausted:
            return draft.chain()._replace(tokens=chain[: job.pages.blocks * size - end])
        if draft.parents:
            try:
                self._draft_branches[job.sequence.seq] = self._branches(job, draft)
            except PoolExhausted:
                return draft.chain()
        return draft

    def _branches(self, job: DecodeJob, draft: Draft) -> tuple[DraftBranch, ...]:
        """Returns the branches of a draft tree, with pages. Raises PoolExhausted with nothing changed."""
        start, size, deep = job.sequence.computed, self.pool.block_tokens, depths(draft.parents)
        parts = chains(draft.parents)[1:]
        ends = [start + 1 + deep[part.first - 1] + part.rows for part in parts]
        counts = [blocks_for(end, size) - start // size for end in ends]
        pages = iter(job.pages.branch(sum(counts), self.growth_reserve))
        return tuple(
            [
                DraftBranch(*part, pages=list(islice(pages, count)))
                for part, count in zip(parts, counts, strict=True)
            ]
        )

    def starved(self) -> DecodeJob | None:
        """Returns, after an empty plan, the oldest sequence, which found no page; None while a grammar compiles."""
        if any(not job.sequence.ready for job in self.running):
            return None
        return next(iter(self.running or self.waiting), None)

    def limits(self) -> tuple[int, int]:
        """Returns how many answers this step may advance, and how many prompt tokens it may compute."""
        if not self.budget.limits:
            return self.max_batch, self.chunk_tokens
        writing = [d.sequence.computed + 1 for d in self.running if not d.prefilling]
        writers = self.budget.batch(writing, self.max_batch)
        first = next((d for d in self.running if d.prefilling), None)
        if first is None:
            return writers, self.chunk_tokens
        beside = writing[:writers]
        return writers, self.budget.chunk(self.chunk_tokens, first.sequence.computed, len(beside), sum(beside))

    def _resume(self) -> None:
        while self.waiting:
            job = self.waiting[0]
            tokens, size = len(job.sequence.tokens), self.pool.block_tokens
            limit, aside = job.holdable, job.swap_entry
            if self.rules is not None and aside is not None:
                limit = min(limit, aside.tokens // size)
            asked = job.chain.hashes, blocks_for(tokens, size), limit, self.growth_reserve
            try:
                brought = aside is not None
                pages, states = opened(self.pool, self.rules, *asked, brought=brought, reach=self.reach)
            except PoolExhausted:
                return
            job.restart(pages, states)
            self._swap_in(job)
            self.add(self.waiting.pop(0))

    def _swap_in(self, job: DecodeJob) -> None:
        """Copies the pages from host memory into the new ones, so that their tokens needn't be computed again."""
        swap_entry, job.swap_entry = job.swap_entry, None
        if self.swap is None or swap_entry is None:
            return
        state = () if job.states is None else job.states.landing().pages
        self.swap.restore(swap_entry, job.pages.pages, job.pages.held, state)
        job.advance(max(0, swap_entry.tokens - job.sequence.computed))
        if job.states is not None:
            job.states.landed(job.sequence.computed, *job.state_terms)

    def _grow(self, job: DecodeJob, take: int) -> bool:
        """Leases pages for ``take`` more tokens, preempting the last sequences if needed; returns False if ``job``
        must wait.
        """
        tokens, size = job.sequence.computed + take, self.pool.block_tokens
        while tokens > job.pages.blocks * size:
            try:
                job.pages.reach(blocks_for(tokens, size))
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
        if self.swap is not None and not job.pages.hollow and job.running is None:
            state = () if job.states is None else job.states.source or ()
            job.swap_entry = self.swap.save(job.pages.pages, job.sequence.computed, state)
        job.close()
        job.sequence.computed = 0
        insort(self.waiting, job, key=lambda d: d.rank)
        self.preemptions += 1
