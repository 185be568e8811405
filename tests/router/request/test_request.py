"""Tests a choice's stream: each index once and in order, whatever is replayed; an end that is one of three."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protos.errors import BatonError, Cancelled, WorkerLost
from baton.protos.nouns import TokenLogprob, TokenLogprobs, TokenRun
from baton.router.request.request import MOST_JOINED, ChoiceStream, ChoiceSummary

ANSWER = tuple(range(100, 130))


def stream() -> ChoiceStream:
    return ChoiceStream(0, ChoiceSummary(prompt_tokens=3))


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


class Behind:
    """A stream whose reader wakes ``late`` seconds after each run came."""

    def __init__(self) -> None:
        self.now, self.late = 100.0, 0.0
        self.stream = ChoiceStream(0, ChoiceSummary(prompt_tokens=3), clock=lambda: self.now)

    async def push(self, start: int, end: int, reason: str = "") -> None:
        self.stream.push(run(start, end, reason))
        self.now += self.late
        await turns()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def read_runs(s: ChoiceStream, found: list[int]) -> None:
    async for r in s:
        found.append(len(r.token_ids))  # noqa: PERF401 (looked at while it grows)


async def test_runs_are_given_at_once_while_the_loop_keeps_up():
    behind, found = Behind(), list[int]()
    reading = asyncio.create_task(read_runs(behind.stream, found))
    await turns()
    for i in range(4):
        await behind.push(i, i + 1)
        assert found == [1] * (i + 1)
        behind.now += 0.005
    reading.cancel()


async def test_a_loop_that_is_behind_gives_the_first_run_at_once_and_joins_what_follows_until_the_end():
    behind, found = Behind(), list[int]()
    behind.late = 0.010
    reading = asyncio.create_task(read_runs(behind.stream, found))
    await turns()
    await behind.push(0, 1)
    assert found == [1]
    await behind.push(1, 2)
    await behind.push(2, 5)
    assert found == [1]
    await behind.push(5, 6, "length")
    assert found == [1, 5]
    await reading


async def test_what_is_held_goes_out_by_itself():
    behind, found = Behind(), list[int]()
    behind.late = 0.010
    reading = asyncio.create_task(read_runs(behind.stream, found))
    await turns()
    await behind.push(0, 1)
    await behind.push(1, 3)
    async with asyncio.timeout(30):
        while found != [1, 2]:
            await asyncio.sleep(0.005)
    reading.cancel()


async def test_runs_in_quick_succession_share_one():
    behind, found = Behind(), list[int]()
    reading = asyncio.create_task(read_runs(behind.stream, found))
    await turns()
    for i in range(4):
        await behind.push(i, i + 1)
        behind.now += 0.0005
    await behind.push(4, 5, "stop")
    assert found == [1, 4]
    await reading


async def test_a_held_run_is_given_before_the_error_that_followed():
    behind, found = Behind(), list[int]()
    behind.late = 0.010
    reading = asyncio.create_task(read_runs(behind.stream, found))
    await turns()
    await behind.push(0, 1)
    await behind.push(1, 3)
    behind.stream.fail(WorkerLost("gone"))
    with pytest.raises(WorkerLost):
        await reading
    assert found == [1, 2]


async def test_a_reader_that_is_cancelled_while_it_waits_or_holds_leaves_a_stream_that_can_be_read():
    behind, found = Behind(), list[int]()
    behind.late = 0.010
    for start, end in ((0, 1), (1, 3)):
        reading = asyncio.create_task(read_runs(behind.stream, found))
        await turns()
        await behind.push(start, end)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    behind.stream.push(run(3, 4, "length"))
    await read_runs(behind.stream, found)
    assert sum(found) == 4


async def test_a_reader_that_is_far_behind_gets_what_waits_some_at_a_time() -> None:
    stream, tokens = ChoiceStream(0, ChoiceSummary(1, stations={})), 5 * MOST_JOINED + 3
    for index in range(tokens):
        stream.push(TokenRun(index, (index,), finish_reason="stop" if index + 1 == tokens else ""))
    runs = [run async for run in stream]
    assert max(len(run.token_ids) for run in runs) == MOST_JOINED
    assert [i for run in runs for i in run.token_ids] == list(range(tokens))
    assert [run.output_index for run in runs] == list(range(0, tokens, MOST_JOINED))
    assert [run.finish_reason for run in runs] == [""] * 5 + ["stop"]
