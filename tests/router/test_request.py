"""A choice's stream: each index once and in order, whatever is replayed; an end that is one of three."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protos.errors import BatonError, Cancelled, WorkerLost
from baton.protos.nouns import TokenLogprob, TokenLogprobs, TokenRun
from baton.router.request import ChoiceStream, Summary

ANSWER = tuple(range(100, 130))


def stream() -> ChoiceStream:
    return ChoiceStream(0, Summary(prompt_tokens=3))


def run(start: int, end: int, reason: str = "") -> TokenRun:
    logprobs = tuple(TokenLogprobs(TokenLogprob(t, -1.0, 1)) for t in ANSWER[start:end])
    return TokenRun(start, ANSWER[start:end], logprobs, reason)


async def collect(s: ChoiceStream) -> list[int]:
    ids: list[int] = []
    async for r in s:
        assert r.output_index == len(ids)
        assert [p.chosen.token_id for p in r.logprobs] == list(r.token_ids)
        ids += r.token_ids
    return ids


@given(cuts=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 12)), max_size=40))
def test_overlapping_runs_give_each_output_once_and_in_order(cuts):
    async def check() -> None:
        s, seen = stream(), 0
        for start, length in cuts:
            start = min(start, seen)
            s.push(run(start, min(29, start + length)))
            seen = max(seen, min(29, start + length))
        s.push(run(min(seen, 29), 30, "length"))
        assert await collect(s) == list(ANSWER)
        assert s.summary.completion_tokens == 30

    asyncio.run(check())


async def test_a_hole_is_an_error_and_not_an_answer():
    s = stream()
    s.push(run(0, 3))
    with pytest.raises(BatonError, match="3 to 4"):
        s.push(run(5, 6))


async def test_runs_that_wait_come_as_one():
    s = stream()
    s.push(run(0, 2))
    s.push(run(2, 5))
    assert (await anext(s)).token_ids == ANSWER[:5]


async def test_a_finish_reason_without_news_still_ends_the_stream():
    s = stream()
    s.push(run(0, 5))
    s.push(TokenRun(4, ANSWER[4:5], (), "stop", 104))
    assert await collect(s) == list(ANSWER[:5])
    assert (s.summary.finish_reason, s.summary.stop_token_id) == ("stop", 104)


async def test_what_came_before_an_error_is_given_out_first():
    s = stream()
    s.push(run(0, 2))
    s.fail(WorkerLost("gone"))
    s.fail(BatonError("later"))
    assert (await anext(s)).token_ids == ANSWER[:2]
    for _ in range(2):
        with pytest.raises(WorkerLost):
            await anext(s)


async def test_a_waiting_reader_hears_of_a_cancel_and_the_callback_runs_once():
    s, calls = stream(), []
    s.on_cancel(lambda: calls.append(s.cancel_reason))
    reading = asyncio.create_task(collect(s))
    await asyncio.sleep(0)
    s.cancel("client_gone")
    s.cancel("deadline")
    with pytest.raises(Cancelled, match="client_gone"):
        await reading
    assert calls == ["client_gone"]


async def test_a_cancel_after_the_end_does_nothing():
    s, calls = stream(), []
    s.on_cancel(lambda: calls.append(1))
    s.push(run(0, 30, "length"))
    s.cancel("client_gone")
    assert await collect(s) == list(ANSWER)
    assert calls == []


async def test_nothing_is_taken_after_the_end():
    s = stream()
    s.push(run(0, 5, "stop"))
    assert s.push(run(5, 6)) == 0
    assert await collect(s) == list(ANSWER[:5])
