"""Decides which prompts a prefill step computes, and how many tokens of each. Torch-free and pure: time is passed
in.

Knows nothing of channels, handoffs or the runner. Shortest remaining prompt first, aged so that a long one isn't
starved; a chunk budget is shared by several short prompts or filled by a part of a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.plan import MOST_SCORED, SequenceStep, StepPlan
from baton.engine.request_checks import blocks_for, holdable_of
from baton.engine.sequence import SequenceState
from baton.engine.states import AttentionReach, SequenceStates, StateRules, opened
from baton.kv.layout.selection import PromptSelection
from baton.kv.pages.pool import PageLease, PagePool
from baton.kv.pages.window import first_seen
from baton.protos.errors import PoolExhausted
from baton.protos.nouns import BLOCK_TOKENS

AGING_TOKENS_PER_S = 2048.0  # tokens by which a second of waiting makes a prompt shorter, so that none starves


class PrefillJob:
    """A prompt being computed. ``hashes`` includes that of the partial last block; ``lease`` comes with the first
    chunk.
    """

    def __init__(
        self,
        sequence: SequenceState,
        hashes: list[bytes],
        now: float,
        block_tokens: int = BLOCK_TOKENS,
        shipped_from: int = 0,
        kept: PromptSelection | None = None,
        whole: bool = False,
    ):
        self.whole = whole  # whether its receiver wants the pages of all tables, whatever their windows
        self.kept = kept  # what its tokens choose of the prompt, where that isn't all of it
        self.shipped_from = shipped_from  # the first block that its receiver may want
        self.block_tokens = block_tokens
        self.sequence = sequence
        self.hashes = hashes
        self.arrived = now
        self.started: float | None = None
        self.lease: PageLease | None = None
        self.states: SequenceStates | None = None  # of a model with recurrent state, from its first chunk on

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of the prompt, with output tokens if an answer is continued."""
        return len(self.sequence.request.token_ids)

    @property
    def held_lease(self) -> PageLease:
        """Returns the page lease of a job that was started; asserts that there is one."""
        assert self.lease is not None, "this job has no pages yet"
        return self.lease

    @property
    def cached_tokens(self) -> int:
        """Returns the number of prompt tokens whose KV was found in the cache."""
        held = 0 if self.lease is None else self.lease.held
        return min(held * self.block_tokens, self.sequence.request.prompt_tokens)

    @property
    def remaining(self) -> int:
        """Returns the number of tokens still to be computed."""
        return self.tokens - self.sequence.computed

    def advance(self, tokens: int) -> None:
        """Counts ``tokens`` more as computed, and makes blocks that are now full findable in the prefix cache."""
        before, sequence = self.sequence.computed, self.sequence
        sequence.computed = before + tokens
        known = sequence.computed if self.kept is None else min(sequence.computed, self.kept.tokens)
        for index in range(before // self.block_tokens, known // self.block_tokens):
            self.held_lease.seal(index, self.hashes[index])
        if self.states is not None:
            at = sequence.computed, self.tokens, self.block_tokens
            self.states.advance(*at, self.hashes.__getitem__, rolling=False)

    def choose(self, scores: Sequence[float]) -> None:
        """Keeps the blocks with the highest ``scores``, to which the prompt's end attends most; frees the others'
        pages.
        """
        assert self.kept is not None, "all of the prompt is kept"
        self.held_lease.select(self.kept.chosen(scores), self.kept.first)

    @property
    def holdable(self) -> int:
        """Returns how many leading blocks may be taken from the prefix cache."""
        limit = holdable_of(self.sequence.request, self.tokens, self.block_tokens)
        return limit if self.kept is None else min(limit, self.kept.first)

    def close(self) -> None:
        """Returns all of the job's pages to the pool."""
        if self.lease is not None:
            self.lease.close()
        if self.states is not None:
            self.states.close()

    def full_hashes(self) -> list[bytes]:
        """Returns the hashes of the full blocks, which are those that can be cached."""
        return self.hashes[: self.tokens // self.block_tokens]


class PrefillScheduler:
    """Holds the jobs in progress and the waiting ones, and plans steps of them."""

    def __init__(
        self,
        pool: PagePool,
        chunk_tokens: int,
        max_batch: int,
        aging: float = AGING_TOKENS_PER_S,
        rules: StateRules | None = None,
        reach: AttentionReach = AttentionReach(),
        may_start: Callable[[int], bool] = lambda key: True,
    ):
        self.pool, self.rules, self.reach = pool, rules, reach
        self.chunk_tokens = chunk_tokens
        self.max_batch = max_batch
        self.aging = aging
        self._may_start = may_start  # whether job ``key``, which comes first, may begin now
        self.jobs: dict[int, PrefillJob] = {}
        self.stuck: tuple[int, ...] = ()  # those of an empty plan that lack pages for their chunk, in its order
        # The first job of a plan that lacks pages to start, though no other job has any.
        self.starved: int | None = None
        self._coming: dict[int, set[bytes]] = {}  # by started job, the blocks that it didn't find in the cache

    def add(self, job: PrefillJob) -> None:
        """Adds ``job``, which waits for its first chunk."""
        self.jobs[job.sequence.seq] = job

    def remove(self, key: int) -> PrefillJob | None:
        """Removes the job with channel key ``key`` and returns it, None if there is none; the caller has to close
        its lease.
        """
        self._coming.pop(key, None)
        return self.jobs.pop(key, None)

    @property
    def waiting_tokens(self) -> int:
        """Returns the number of tokens still to be computed, over all jobs."""
        return sum(job.remaining for job in self.jobs.values())

    def plan(self, now: float) -> StepPlan:
        """Returns the next step, empty if there is nothing to do; jobs that it starts get their page lease.

        ``now`` is in monotonic seconds.
        """
        step, room = _PlannedStep(self.chunk_tokens, self.rules), True
        first: int | None = None  # that lacks pages to start
        for job in sorted(self.jobs.values(), key=lambda j: self._urgency(j, now)):
            if step.budget == 0 or len(step.items) == self.max_batch:
                break
            if job.lease is None and room and not self._comes_now(job, step):
                room = self._may_start(job.sequence.seq) and self._start(job, now)
                first = first if room else job.sequence.seq
            if job.lease is not None:
                step.add(job)
        self.stuck = () if step.items else tuple(step.stuck)
        self.starved = None if any(job.lease is not None for job in self.jobs.values()) else first
        return StepPlan(tuple(step.items))

    def _urgency(self, job: PrefillJob, now: float) -> tuple[int, float, int]:
        return (
            job.sequence.request.priority,
            job.remaining - self.aging * (now - job.arrived),
            job.sequence.seq,
        )

    def _comes_now(self, job: PrefillJob, step: _PlannedStep) -> bool:
        """Returns whether ``step`` has a chunk of another job that computes the very next block that ``job`` lacks,
        so that waiting is cheaper.

        Such a job takes its chunk in the place of ``job``, however low its own priority is.
        """
        limit = job.holdable
        if self.rules is not None:
            have = self.rules.deepest(self.pool, job.full_hashes(), limit)
        else:
            have = min(self.pool.match(job.full_hashes()), limit)
        return have < limit and any(
            job.hashes[have] in blocks and self._comes(other, have) and step.add(self.jobs[other])
            for other, blocks in self._coming.items()
        )

    def _comes(self, key: int, block: int) -> bool:
        """Returns whether job ``key`` still has to compute its block ``block``: one that it computed may be behind
        its window and evicted. With recurrent state a computed block may wait for its checkpoint.
        """
        return self.rules is not None or self.jobs[key].sequence.computed < (block + 1) * self.pool.block_tokens

    @property
    def growth(self) -> int:
        """Returns the number of pages that the started jobs may still need, which stay available to them."""
        if not self.reach.most:
            return 0
        leases = ((job.tokens, job.lease) for job in self.jobs.values() if job.lease is not None)
        size = self.pool.block_tokens
        return sum(lease.growth(blocks_for(tokens, size), self.reach.most) for tokens, lease in leases)

    def reach_of(self, job: PrefillJob) -> AttentionReach:
        """Returns which blocks ``job`` needs pages for; all, if its receiver wants some behind a window."""
        reach, size = self.reach._replace(wanted_from=job.shipped_from), self.pool.block_tokens
        if job.whole:
            return reach._replace(windows=(0,) * reach.tables, grows=False, most=())
        wants_more = reach.window and job.shipped_from < first_seen(job.tokens, reach.window, size)
        return reach._replace(most=()) if wants_more else reach

    def _start(self, job: PrefillJob, now: float) -> bool:
        try:
            limit = job.holdable
            blocks = blocks_for(job.tokens, job.block_tokens)
            reach = self.reach_of(job)
            lease, job.states = opened(
                self.pool, self.rules, job.full_hashes(), blocks, limit, self.growth, reach=reach
            )
        except PoolExhausted:
            return False
        job.lease, job.started = lease, now
        lease.hinted_blocks = job.sequence.request.hinted_blocks(lease.block_tokens)
        job.sequence.computed = lease.held * job.block_tokens
        self._coming[job.sequence.seq] = set(job.full_hashes()[lease.held :])
        return True


class _PlannedStep:
    """Collects the chunks of a step, ``budget`` tokens in all. Torch-free.

    ``stuck`` lists those that lack pages for their chunk.
    """

    def __init__(self, budget: int, rules: StateRules | None) -> None:
        self.items: list[SequenceStep] = []
        self.stuck: list[int] = []
        self.budget = budget
        self._rules, self._scored = rules, MOST_SCORED
        self._added: dict[int, bool] = {}

    def add(self, job: PrefillJob) -> bool:
        """Adds a chunk of started ``job``, unless it has been tried; returns whether the step has one."""
        seq = job.sequence.seq
        if seq not in self._added:
            self._added[seq] = self._add(job, job.held_lease)
        return self._added[seq]

    def _add(self, job: PrefillJob, lease: PageLease) -> bool:
        scores = job.sequence.scores_prompt
        most = min(self.budget, self._scored) if scores else self.budget
        take = _taken(job, most, self._rules) if most else 0
        if take == 0 or (scores and take > self._scored < MOST_SCORED):
            return False  # selecting tokens, which are taken together, wait for rows of a step of their own
        if not _reaches(job, lease, take):
            self.stuck.append(job.sequence.seq)
            return False
        item = _chunk(job, lease, take)
        self.items.append(item)
        self.budget = max(0, self.budget - len(item.tokens))
        self._scored = max(0, self._scored - len(item.targets))
        return True


def _taken(job: PrefillJob, budget: int, rules: StateRules | None) -> int:
    """Returns the number of tokens that the next step computes of ``job``, ``budget`` at most.

    The last token waits until the grammar is compiled that says what may follow it.
    """
    start, ready = job.sequence.computed, job.sequence.ready
    end = start + min(job.sequence.pending - (not ready), budget)
    if rules is not None:
        end = rules.cut(start, end, job.tokens, job.block_tokens)
    end = end if job.kept is None else job.kept.cut(start, end)
    return end - start if end < job.tokens or ready else 0  # selecting tokens are taken together


def _reaches(job: PrefillJob, lease: PageLease, take: int) -> bool:
    """Leases the pages that ``take`` more tokens write; returns False if there are too few."""
    try:
        lease.reach(blocks_for(job.sequence.computed + take, job.block_tokens))
    except PoolExhausted:
        return False
    return True


def _chunk(job: PrefillJob, lease: PageLease, take: int) -> SequenceStep:
    sequence, states = job.sequence, job.states
    start = sequence.computed
    return SequenceStep(
        seq=sequence.seq,
        tokens=sequence.tokens[start : start + take],
        start=start,
        pages=lease.pages,
        sample=sequence.sample_spec() if take == sequence.pending else None,
        is_prefill=True,
        targets=sequence.targets(take),
        pool=sequence.pools,
        score_top=sequence.request.sampling.prompt_logprobs or 0,
        state_from=None if states is None else states.source,
        state_to=() if states is None else states.target,
        adapter=sequence.request.adapter_id,
        gap=lease.gap if job.kept is not None else (0, 0),
        watch=None if job.kept is None else job.kept.watched_in(start, start + take),
        tables=lease.tables,
    )
