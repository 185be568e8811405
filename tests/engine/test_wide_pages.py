"""Pages of several runs over a runner that reads runs of 16: the same answers; tables grow and are not rebuilt."""

from __future__ import annotations

import random

import pytest

from baton.engine.backends.paced.runner import PacedRunner, paced_answer
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.wide_pages import WidePages, widened
from baton.kv.pages.pool import PagePool
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling

VOCAB, ROW = 5000, 32
SHAPE = {"kv_bytes_per_token": ROW, "vocab_size": VOCAB, "max_model_len": 4096}
GREEDY = Sampling(temperature=0.0, max_tokens=90)


def wide(block_tokens: int, pages: int = 40) -> WidePages:
    made = WidePages(PacedRunner("test", step_seconds=lambda shape: 0.0, **SHAPE), block_tokens)  # type: ignore[arg-type]
    made.bind(memoryview(bytearray(pages * made.spec.layout.page_bytes)), pages)
    return made


def step(runner: WidePages, tokens: list[int], start: int, pages: list[int]) -> int:
    spec = SampleSpec(GREEDY, 0, len(tokens), tokens, len(tokens))
    item = SequenceStep(1, tokens[start:], start, pages, spec)
    return runner.run(StepPlan((item,))).sampled[0].token_id


@pytest.mark.parametrize("block_tokens", [16, 32, 80])
def test_answers_are_those_of_pages_of_16(block_tokens: int) -> None:
    rng = random.Random(2)
    prompt = [rng.randrange(VOCAB) for _ in range(130)]
    runner, order = wide(block_tokens), rng.sample(range(40), 40)
    tokens, pages, start = list(prompt), list[int](), 0
    while len(tokens) < len(prompt) + 90:
        while len(pages) * block_tokens < len(tokens):
            pages.append(order.pop())
        after = step(runner, tokens, start, pages)
        start = len(tokens)
        tokens.append(after)
    assert tokens[len(prompt) :] == paced_answer(prompt, GREEDY, **SHAPE)


def test_a_table_that_grows_is_grown_and_one_that_was_given_up_is_forgotten() -> None:
    runner, pages = wide(32), [3]
    tokens = list(range(40))
    step(runner, tokens[:20], 0, pages)
    table = runner._tables[1][1]
    pages.append(5)
    step(runner, tokens, 20, pages)
    assert runner._tables[1][1] is table
    assert table == [6, 7, 10, 11]
    step(runner, tokens, 0, [8, 9])
    assert runner._tables[1][1] == [16, 17, 18, 19]


def test_a_table_that_shrank_and_grew_again_is_read_anew() -> None:
    runner, pool = wide(32), PagePool(8, 32)
    lease, tokens = pool.open([], 2), list(range(40))
    step(runner, tokens, 0, lease.pages)
    kept, spare = lease.pages
    lease.shrink(1)
    with pool.open([], 1) as other:
        assert other.pages == [spare]
        lease.extend(1)
        step(runner, tokens, 20, lease.pages)
    assert runner._tables[1][1] == [run for page in lease.pages for run in (2 * page, 2 * page + 1)]
    assert lease.pages[0] == kept


def test_sizes_that_cannot_be_are_refused_and_16_is_no_wrapper() -> None:
    runner = PacedRunner("test", step_seconds=lambda shape: 0.0, **SHAPE)  # type: ignore[arg-type]
    assert widened(runner, 16) is runner
    with pytest.raises(ConfigError, match="multiple of 16"):
        widened(runner, 40)
