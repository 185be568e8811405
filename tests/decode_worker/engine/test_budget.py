"""Steps kept as short as asked: chunk and batch limits from measured steps, and the order by priority."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from baton.cost.curves import step_seconds
from baton.decode_worker.engine.budget import REFIT_EVERY, StepBudget
from baton.decode_worker.engine.job import DecodeJob
from baton.decode_worker.engine.scheduler import DecodeScheduler
from baton.engine.plan import StepPlan
from baton.engine.request_checks import blocks_for
from baton.engine.sequence import SequenceState
from baton.kv.layout import prefix
from baton.kv.pages.pool import PagePool
from baton.protos.measurements import StepCurve, StepSample
from baton.protos.nouns import EngineRequest, Sampling

ROOT = prefix.root("f", "test")
MACHINE = StepCurve(1e-3, 2e-4, 2e-9, 5e-4, 1e-7)


def join(scheduler: DecodeScheduler, seq: int, prompt: int, priority: int = 0) -> DecodeJob:
    tokens = tuple((seq * 1000 + i) % 9973 for i in range(prompt))
    request = replace(EngineRequest(str(seq), tokens, prompt, Sampling(max_tokens=100)), priority=priority)
    pages = scheduler.pool.open((), blocks_for(prompt), 0)
    job = DecodeJob(SequenceState(seq, request, (), 8192), ROOT, pages, seq)
    scheduler.add(job)
    return job


def advance(plan: StepPlan, by_seq: dict[int, DecodeJob]) -> None:
    for item in plan.items:
        by_seq[item.seq].advance(len(item.tokens))
        if item.sample is not None:
            by_seq[item.seq].sequence.append(1)
            by_seq[item.seq].chain.append(1)


def taught(target_s: float) -> StepBudget:
    """A budget that has seen steps of MACHINE, with noise."""
    budget, rng = StepBudget(target_s), random.Random(1)
    for _ in range(8 * REFIT_EVERY):
        new, start, count = rng.choice((0, 32, 256)), rng.randrange(1000), rng.randrange(1, 30)
        sample = StepSample(new, new * (start + new / 2), count, count * rng.randrange(16, 900), 0.0)
        budget.observe(replace(sample, seconds=step_seconds(MACHINE, sample) * rng.uniform(0.95, 1.05)))
    return budget


def test_without_a_target_or_before_it_has_learned_nothing_is_limited() -> None:
    for budget in (StepBudget(), StepBudget(0.01)):
        assert budget.chunk(512, 0, 8, 4000) == 512
        assert budget.batch([100] * 40, 64) == 64


@pytest.mark.parametrize("start", [0, 2000])
def test_a_chunk_fills_the_step_up_to_the_target(start: int) -> None:
    target, budget = 0.05, taught(0.05)
    chunk = budget.chunk(512, start, 10, 5000)
    took = step_seconds(MACHINE, StepSample(chunk, chunk * (start + chunk / 2), 10, 5000, 0.0))
    assert 0.75 * target < took < 1.1 * target
    assert chunk % 16 == 0
    assert budget.chunk(512, start, 0, 0) == 512, "nobody waits for a token"


def test_a_prompt_gets_on_even_where_decoding_alone_misses_the_target() -> None:
    budget = taught(0.005)
    assert 16 <= budget.chunk(512, 0, 30, 20_000) < 64


def test_the_batch_is_as_large_as_the_target_allows_and_never_empty() -> None:
    budget = taught(0.011)
    assert 16 <= budget.batch([100] * 64, 64) <= 22
    assert budget.batch([100] * 4, 64) == 64
    assert taught(1e-4).batch([100] * 8, 64) == 1


def test_decodes_keep_their_pace_while_a_long_prompt_is_read() -> None:
    scheduler = DecodeScheduler(PagePool(400), 16, 512, taught(0.03))
    by_seq = {seq: join(scheduler, seq, 16) for seq in range(8)}
    for _ in range(3):
        advance(scheduler.plan(), by_seq)
    by_seq[9] = join(scheduler, 9, 1500)
    steps = 0
    while by_seq[9].prefilling:
        plan = scheduler.plan()
        assert len(plan.items) == 9
        assert step_seconds(MACHINE, plan.shape()) < 0.035
        advance(plan, by_seq)
        steps += 1
    assert 1500 / 512 < steps < 25


def test_a_more_urgent_request_is_served_first_and_preempted_last() -> None:
    scheduler = DecodeScheduler(PagePool(8), 1, 64)
    by_seq = {1: join(scheduler, 1, 30, priority=5), 2: join(scheduler, 2, 30, priority=-1)}
    assert [item.seq for item in scheduler.plan().items] == [2]
    scheduler.max_batch = 2
    for _ in range(60):
        advance(scheduler.plan(), by_seq)
        if scheduler.preemptions:
            break
    assert [d.sequence.seq for d in scheduler.running] == [2]
    assert [d.sequence.seq for d in scheduler.waiting] == [1]
