"""Tests which prompts a step reads: over a real pool, with the time passed in; no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.grammar.state import GrammarState
from baton.engine.plan import MOST_SCORED
from baton.engine.sequence import SequenceState
from baton.kv.layout import prefix
from baton.kv.layout.selection import AttentionSelection
from baton.kv.pages.pool import PagePool
from baton.prefill_worker.engine.scheduler import PrefillJob, PrefillScheduler
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest, Sampling

ROOT = prefix.root("f", "test")


def add(
    scheduler: PrefillScheduler,
    seq: int,
    length: int,
    salt: int = 0,
    now: float = 0.0,
    priority: int = 0,
    sampling: Sampling = Sampling(),
    grammar: GrammarState | None = None,
) -> PrefillJob:
    tokens = tuple((salt * 1000 + i) % 9973 for i in range(length))
    request = EngineRequest(str(seq), tokens, length, sampling, priority=priority)
    job = PrefillJob(SequenceState(seq, request, (), 8192, grammar), prefix.chain(ROOT, tokens), now)
    scheduler.add(job)
    return job


def compiling() -> GrammarState:
    return cast("GrammarState", SimpleNamespace(ready=False, done=False, mask=None))


def run(scheduler: PrefillScheduler, now: float = 0.0) -> list[tuple[int, int]]:
    """Runs one step: blocks are sealed, finished prompts give their pages back.

    Returns what was planned, as (seq, tokens).
    """
    plan = scheduler.plan(now)
    for item in plan.items:
        job = scheduler.jobs[item.seq]
        job.sequence.computed += len(item.tokens)
        for index in range(item.start // BLOCK_TOKENS, job.sequence.computed // BLOCK_TOKENS):
            job.held_lease.seal(index, job.hashes[index])
        if item.sample is not None:
            scheduler.remove(item.seq)
            job.held_lease.close()
    return [(item.seq, len(item.tokens)) for item in plan.items]


def test_a_budget_is_shared_by_short_prompts_and_filled_with_a_piece_of_the_next() -> None:
    scheduler = PrefillScheduler(PagePool(64), chunk_tokens=100, max_batch=8)
    for seq, length in ((1, 200), (2, 30), (3, 40)):
        add(scheduler, seq, length, salt=seq)
    assert run(scheduler) == [(2, 30), (3, 40), (1, 30)]
    assert run(scheduler) == [(1, 100)]


def test_prompts_that_want_logprobs_share_a_steps_rows_for_them_and_leave_the_rest_to_others() -> None:
    scheduler = PrefillScheduler(PagePool(256), chunk_tokens=512, max_batch=8)
    for seq, length in ((1, 100), (2, 200)):
        add(scheduler, seq, length, salt=seq, sampling=Sampling(prompt_logprobs=1))
    add(scheduler, 3, 400, salt=3)
    assert run(scheduler) == [(1, 100), (2, MOST_SCORED - 99), (3, 383)], (
        "the last token has none behind it to score"
    )
    assert run(scheduler) == [(3, 17), (2, MOST_SCORED)]
    assert run(scheduler) == [(2, 200 - 2 * MOST_SCORED + 99)]


def test_prompts_that_select_their_pages_share_a_steps_rows_for_logprobs_too() -> None:
    scheduler = PrefillScheduler(PagePool(256), chunk_tokens=512, max_batch=8)
    for seq in (1, 2):
        request = EngineRequest(str(seq), tuple(range(seq, 400 + seq)), 400, Sampling(prompt_logprobs=1))
        kept = AttentionSelection(112, 64).prompt_selection_of(400, BLOCK_TOKENS)
        scheduler.add(
            PrefillJob(SequenceState(seq, request, (), 8192), prefix.chain(ROOT, request.token_ids), 0.0, kept=kept)
        )
    steps = [run(scheduler) for _ in range(8)]
    most = max(sum(tokens for _, tokens in step) for step in steps)
    assert most <= MOST_SCORED + 1, "a last token has none behind it to score"
    assert sum(tokens for step in steps for _, tokens in step) == 800, "both are read whole"


def test_a_window_of_selecting_tokens_that_is_longer_than_a_steps_rows_has_a_step_to_itself() -> None:
    scheduler = PrefillScheduler(PagePool(256), chunk_tokens=512, max_batch=8)
    scored = Sampling(prompt_logprobs=1)
    request = EngineRequest("1", tuple(range(600)), 600, scored)
    kept = AttentionSelection(400, 256).prompt_selection_of(600, BLOCK_TOKENS)
    scheduler.add(
        PrefillJob(SequenceState(1, request, (), 8192), prefix.chain(ROOT, request.token_ids), 0.0, kept=kept)
    )
    add(scheduler, 2, 20, salt=2, sampling=scored)
    steps = [run(scheduler) for _ in range(5)]
    assert (1, 264) in [each for step in steps for each in step]
    assert all(len(step) == 1 for step in steps if (1, 264) in step)
    assert sum(tokens for step in steps for _, tokens in step) == 620


def test_who_waited_long_enough_goes_before_the_short_ones() -> None:
    scheduler = PrefillScheduler(PagePool(128), chunk_tokens=64, max_batch=8, aging=100.0)
    add(scheduler, 1, 500, salt=1)
    add(scheduler, 2, 64, salt=2, now=4.0)
    assert run(scheduler, now=4.0) == [(2, 64)]
    add(scheduler, 3, 64, salt=3, now=6.0)
    assert run(scheduler, now=6.0) == [(1, 64)]


def test_prompts_with_a_common_prefix_compute_it_once() -> None:
    scheduler = PrefillScheduler(PagePool(64), chunk_tokens=512, max_batch=8)
    first, second = add(scheduler, 1, 100), add(scheduler, 2, 130)
    assert run(scheduler) == [(1, 100)]
    assert run(scheduler) == [(2, 130 - 96)]
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)


def test_while_a_grammar_compiles_all_but_the_prompts_last_token_is_read_and_others_find_it() -> None:
    scheduler = PrefillScheduler(PagePool(64), chunk_tokens=512, max_batch=8)
    grammar = compiling()
    add(scheduler, 1, 100, grammar=grammar)
    add(scheduler, 2, 130)
    assert run(scheduler) == [(1, 99)]
    assert run(scheduler) == [(2, 130 - 96)]
    assert run(scheduler) == []
    vars(grammar).update(ready=True)
    assert run(scheduler) == [(1, 1)]


def test_nobody_waits_for_a_prompt_whose_end_cannot_be_read_while_its_grammar_compiles() -> None:
    """A prompt that selects its pages has its last tokens taken together, and not before a token can be chosen."""
    scheduler = PrefillScheduler(PagePool(64), chunk_tokens=512, max_batch=8)
    request = EngineRequest("1", tuple(range(200)), 200, Sampling())
    kept = AttentionSelection(112, 64).prompt_selection_of(200, BLOCK_TOKENS)
    assert kept is not None
    sequence = SequenceState(1, request, (), 8192, compiling())
    scheduler.add(PrefillJob(sequence, prefix.chain(ROOT, request.token_ids), 0.0, kept=kept))
    for seq in (2, 3):
        add(scheduler, seq, 220)
    assert run(scheduler) == [(1, 128)]
    assert run(scheduler) == [(2, 220 - 128)], "one of those that could wait computes for the other"
    assert run(scheduler) == [(3, 220 - 208)]


def test_a_prompt_that_another_waits_for_is_read_in_its_place_however_low_its_own_priority() -> None:
    scheduler = PrefillScheduler(PagePool(512), chunk_tokens=64, max_batch=8)
    add(scheduler, 1, 640, priority=9)
    assert run(scheduler) == [(1, 64)]
    add(scheduler, 2, 256)
    for seq in range(3, 10):
        add(scheduler, seq, 640, salt=seq)
    assert [run(scheduler) for _ in range(4)] == [[(1, 64)]] * 3 + [[(2, 16), (3, 48)]]
    assert scheduler.jobs[1].sequence.computed == 256, "no block was computed twice"


def test_a_prompt_that_finds_no_pages_waits_without_holding_back_what_runs() -> None:
    scheduler = PrefillScheduler(PagePool(10), chunk_tokens=32, max_batch=8)
    add(scheduler, 1, 120, salt=1)
    run(scheduler)
    add(scheduler, 2, 60, salt=2)
    assert run(scheduler) == [(1, 32)]
    assert scheduler.jobs[2].lease is None


def test_a_prompt_that_selects_its_pages_holds_up_no_step_while_its_grammar_compiles() -> None:
    """Its last tokens are taken together, beyond the budget; no token can be chosen after them yet."""
    scheduler = PrefillScheduler(PagePool(64), chunk_tokens=32, max_batch=8)
    request = EngineRequest("1", tuple(range(200)), 200, Sampling())
    sequence = SequenceState(1, request, (), 8192, compiling())
    kept = AttentionSelection(112, 64).prompt_selection_of(200, BLOCK_TOKENS)
    scheduler.add(PrefillJob(sequence, prefix.chain(ROOT, request.token_ids), 0.0, kept=kept))
    while planned := run(scheduler):
        assert planned == [(1, 32)]
    assert sequence.computed == 128, "what can be read without choosing a token is read"
    add(scheduler, 2, 20, salt=2)
    assert run(scheduler) == [(2, 20)]


@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(0, 2), st.integers(-1, 1)), min_size=1, max_size=12),
    st.integers(10, 40),
    st.integers(1, 64),
)
def test_every_prompt_is_read_whole_and_every_page_comes_back(
    prompts: list[tuple[int, int, int]], pages: int, chunk: int
) -> None:
    scheduler = PrefillScheduler(PagePool(pages), chunk, max_batch=4)
    jobs = [add(scheduler, seq, n, salt, priority=p) for seq, (n, salt, p) in enumerate(prompts)]
    for step in range(5000):
        planned = run(scheduler, now=step * 0.01)
        scheduler.pool.check()
        assert sum(tokens for _, tokens in planned) <= chunk
        if not planned:
            break
    assert all(job.sequence.computed == job.tokens for job in jobs)
    assert scheduler.pool.snapshot_counts().leases == 0


def test_nobody_waits_for_a_block_that_was_computed_and_evicted() -> None:
    scheduler = PrefillScheduler(PagePool(64), chunk_tokens=32, max_batch=8)
    first = add(scheduler, 1, 200)
    run(scheduler)
    scheduler.pool.match = lambda hashes: 0  # type: ignore[method-assign]
    second = add(scheduler, 2, 150)
    scheduler.plan(0.0)
    assert first.lease is not None
    assert second.lease is not None
