"""Continuous batching over a real pool: growth, preemption, budgets; no engine."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from baton.decode_worker.engine.following import following
from baton.decode_worker.engine.job import DecodeJob
from baton.decode_worker.engine.scheduler import DecodeScheduler
from baton.engine.grammar.state import GrammarState
from baton.engine.plan import MOST_SCORED, SampledToken
from baton.engine.request_checks import blocks_for, holdable
from baton.engine.sequence import SequenceState
from baton.kv.layout import prefix
from baton.kv.layout.running import RunningScores
from baton.kv.layout.selection import AttentionSelection
from baton.kv.pages.pool import PagePool
from baton.protos.errors import PoolExhausted
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest, Sampling
from tests.engine.speculate.oracle import Eager, Oracle

VOCAB = 9973
ROOT = prefix.root("f", "test")


def sequence(seq: int, prompt: int, max_tokens: int = 40, scored: int | None = None) -> SequenceState:
    tokens = tuple((seq * 1000 + i) % 9973 for i in range(prompt))
    sampling = Sampling(max_tokens=max_tokens, prompt_logprobs=scored)
    return SequenceState(seq, EngineRequest(str(seq), tokens, prompt, sampling), (), 4096)


def join(
    scheduler: DecodeScheduler, seq: int, prompt: int, max_tokens: int = 40, scored: int | None = None
) -> DecodeJob:
    hashes = prefix.block_hashes(ROOT, sequence(seq, prompt).tokens)
    pages = scheduler.pool.open(hashes, blocks_for(prompt), scheduler.growth_reserve, limit_held=holdable(prompt))
    job = DecodeJob(sequence(seq, prompt, max_tokens, scored), ROOT, pages, seq)
    scheduler.add(job)
    return job


def run(scheduler: DecodeScheduler, by_seq: dict[int, DecodeJob]) -> list[tuple[int, int]]:
    """Runs one step, in which every sampled token is 1; returns what was planned, as (seq, tokens)."""
    plan = scheduler.plan()
    for item in plan.items:
        job = by_seq[item.seq]
        assert len(item.pages) * 16 >= item.start + len(item.tokens)
        job.advance(len(item.tokens))
        if item.sample is not None:
            job.sequence.append(1)
            job.chain.append(1)
            if job.sequence.finish_reason:
                scheduler.remove(job)
    return [(item.seq, len(item.tokens)) for item in plan.items]


def test_decodes_go_on_while_a_prompt_is_read_in_chunks() -> None:
    scheduler = DecodeScheduler(PagePool(64), max_batch=8, chunk_tokens=32)
    by_seq = {1: join(scheduler, 1, 10)}
    assert run(scheduler, by_seq) == [(1, 10)]
    by_seq[2] = join(scheduler, 2, 100)
    assert [run(scheduler, by_seq) for _ in range(5)] == [
        [(1, 1), (2, 32)],
        [(1, 1), (2, 32)],
        [(1, 1), (2, 32)],
        [(1, 1), (2, 4)],
        [(1, 1), (2, 1)],
    ]


def test_prompts_that_want_logprobs_share_a_steps_rows_for_them_and_leave_the_rest_to_others() -> None:
    scheduler = DecodeScheduler(PagePool(256), max_batch=8, chunk_tokens=512)
    by_seq = {
        1: join(scheduler, 1, 100, scored=1),
        2: join(scheduler, 2, 200, scored=1),
        3: join(scheduler, 3, 400),
    }
    assert run(scheduler, by_seq) == [(1, 100), (2, MOST_SCORED - 100), (3, 384)]
    assert run(scheduler, by_seq) == [(1, 1), (2, MOST_SCORED), (3, 16)]
    assert run(scheduler, by_seq)[:2] == [(1, 1), (2, 300 - 2 * MOST_SCORED)]


def test_prompts_that_select_their_pages_share_a_steps_rows_for_logprobs_too() -> None:
    scheduler, by_seq = DecodeScheduler(PagePool(256), max_batch=8, chunk_tokens=512), {}
    for seq in (1, 2):
        by_seq[seq] = job = join(scheduler, seq, 400, scored=1)
        job.kept = AttentionSelection(112, 64).prompt_selection_of(400, BLOCK_TOKENS)
    by_seq[3] = join(scheduler, 3, 400, scored=1)
    by_seq[3].running = RunningScores(AttentionSelection(112, 64, running=True), BLOCK_TOKENS, 400, None)
    for _ in range(12):
        plan = scheduler.plan()
        assert sum(len(item.targets) for item in plan.items) <= MOST_SCORED
        for item in plan.items:
            by_seq[item.seq].sequence.computed += len(item.tokens)
            if item.sample is not None:
                scheduler.remove(by_seq[item.seq])
    assert not scheduler.running, "all are read whole"


def test_while_a_grammar_compiles_all_but_the_prompts_last_token_is_read() -> None:
    scheduler = DecodeScheduler(PagePool(64), max_batch=8, chunk_tokens=32)
    job = join(scheduler, 1, 50)
    grammar = SimpleNamespace(ready=False, mask=None)
    job.sequence = SequenceState(1, job.sequence.request, (), 4096, cast("GrammarState", grammar))
    first = scheduler.plan()
    behind = following(scheduler, first)
    assert behind is not None
    assert [len(plan.items[0].tokens) for plan in (first, behind.plan)] == [32, 17], "planned ahead, it is the same"
    assert [run(scheduler, {1: job}) for _ in range(3)] == [[(1, 32)], [(1, 17)], []]
    assert scheduler.starved() is None
    grammar.ready = True
    (last,) = scheduler.plan().items
    assert (last.start, len(last.tokens), last.sample is None) == (49, 1, False)


def test_two_prompts_share_one_chunk_budget_oldest_first() -> None:
    scheduler = DecodeScheduler(PagePool(64), max_batch=8, chunk_tokens=32)
    by_seq = {n: join(scheduler, n, 20) for n in (1, 2)}
    assert run(scheduler, by_seq) == [(1, 20), (2, 12)]


def test_the_batch_is_bounded_and_the_oldest_are_in_it() -> None:
    scheduler = DecodeScheduler(PagePool(64), max_batch=2, chunk_tokens=512)
    by_seq = {n: join(scheduler, n, 5) for n in (1, 2, 3)}
    assert [seq for seq, _ in run(scheduler, by_seq)] == [1, 2]


def test_the_oldest_is_never_preempted() -> None:
    scheduler = DecodeScheduler(PagePool(6), max_batch=8, chunk_tokens=512)
    by_seq = {n: join(scheduler, n, 16) for n in (1, 2, 3)}
    for _ in range(200):
        run(scheduler, by_seq)
        assert by_seq[1] not in scheduler.waiting
    assert scheduler.preemptions > 0
    assert all(d.sequence.finish_reason == "length" for d in by_seq.values())


def test_newcomers_leave_a_page_for_each_running_sequence() -> None:
    scheduler = DecodeScheduler(PagePool(32), max_batch=8, chunk_tokens=512)
    for n in (1, 2, 3):
        join(scheduler, n, 16)
    assert scheduler.growth_reserve == 3
    try:
        join(scheduler, 4, 16 * 27)
    except PoolExhausted:
        return
    raise AssertionError("the reserve was given away")


def run_drafted(scheduler: DecodeScheduler, by_seq: dict[int, DecodeJob], rng: random.Random) -> int:
    """One step in which any number of each sequence's drafts stand; how many items it had."""
    plan = scheduler.plan()
    for item in plan.items:
        job = by_seq[item.seq]
        assert len(item.pages) * 16 >= item.start + len(item.tokens)
        assert len(item.verify) <= job.sequence.draft_room
        job.advance(len(item.tokens) - len(item.verify))
        if item.sample is None:
            continue
        stood = rng.randint(0, len(item.verify))
        chosen = [*item.drafts[:stood], rng.randrange(VOCAB)]
        job.take([SampledToken(item.seq, token) for token in chosen], len(item.verify))
        if job.sequence.finish_reason:
            scheduler.remove(job)
        elif item.verify:
            job.give_back()
            assert len(job.pages.pages) <= blocks_for(len(job.sequence.tokens))
    return len(plan.items)


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(1, 60)), min_size=1, max_size=8), st.integers(9, 30))
def test_with_drafts_everything_finishes_and_only_known_tokens_are_findable(
    sizes: list[tuple[int, int]], pages: int
) -> None:
    rng = random.Random(pages)
    drafter = Eager(Oracle({str(seq): [7] * 100 for seq in range(len(sizes))}, 0.5, VOCAB), most=16)
    scheduler = DecodeScheduler(PagePool(pages), max_batch=4, chunk_tokens=24, drafter=drafter)
    by_seq: dict[int, DecodeJob] = {}
    waiting = list(enumerate(sizes))
    for _ in range(3000):
        if waiting and not scheduler.waiting:
            try:
                by_seq[waiting[0][0]] = join(scheduler, waiting[0][0], *waiting[0][1])
                waiting.pop(0)
            except PoolExhausted:
                pass
        planned = run_drafted(scheduler, by_seq, rng)
        scheduler.pool.check()
        if not planned and not waiting:
            break
    assert all(d.sequence.finish_reason == "length" for d in by_seq.values())
    assert all(d.sequence.outputs == d.sequence.request.sampling.max_tokens for d in by_seq.values())
    assert scheduler.pool.snapshot_counts().leases == 0
    known = {found for d in by_seq.values() for found in prefix.block_hashes(ROOT, d.sequence.tokens)}
    assert known.issuperset(scheduler.pool.findable())


def test_drafts_take_no_page_that_another_will_need() -> None:
    drafter = Eager(Oracle({"1": [7] * 100}, 1.0, VOCAB), most=16, seed=3)
    scheduler = DecodeScheduler(PagePool(4), max_batch=4, chunk_tokens=64, drafter=drafter)
    by_seq = {1: join(scheduler, 1, 30), 2: join(scheduler, 2, 30)}
    rng = random.Random(0)
    for _ in range(2):
        run_drafted(scheduler, by_seq, rng)
        assert scheduler.preemptions == 0
    assert len(by_seq[1].pages.pages) == 2


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(1, 60)), min_size=1, max_size=8), st.integers(9, 30))
def test_everything_finishes_and_every_page_comes_back(sizes: list[tuple[int, int]], pages: int) -> None:
    scheduler = DecodeScheduler(PagePool(pages), max_batch=4, chunk_tokens=24)
    by_seq: dict[int, DecodeJob] = {}
    waiting = list(enumerate(sizes))
    for _ in range(3000):
        if waiting and not scheduler.waiting:
            seq, (prompt, max_tokens) = waiting[0]
            try:
                by_seq[seq] = join(scheduler, seq, prompt, max_tokens)
                waiting.pop(0)
            except PoolExhausted:
                pass
        planned = run(scheduler, by_seq)
        scheduler.pool.check()
        if not planned and not waiting:
            break
    assert len(by_seq) == len(sizes)
    assert all(d.sequence.finish_reason for d in by_seq.values())
    assert scheduler.pool.snapshot_counts().leases == 0
