"""Tests a session's outbox: order is kept, a slow reader gets merged frames, a cancelled request's tokens
vanish.
"""

from __future__ import annotations

import asyncio
from typing import Any

from baton.decode_worker.io import router_session as sessions
from baton.decode_worker.io.router_session import RouterSession, SessionRequest, TokenFrame, merge
from baton.protos import channel as ch
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import Station, TokenLogprob, TokenLogprobs, TokenRun


def output(key: int, index: int, token: int, finish: str = "") -> ch.Output:
    logprobs = (TokenLogprobs(TokenLogprob(token, -1.0, 1)),)
    return ch.Output(key, TokenRun(index, (token,), logprobs, finish), 7 if index == 0 else 0)


def request(session: RouterSession, key: int) -> SessionRequest:
    made = SessionRequest(key, f"r{key}", session, "", False)
    session.requests[made.request_id] = made
    return made


async def drained(session: RouterSession) -> list[Any]:
    session.end()
    return [item async for item in session.outgoing()]


async def test_frames_that_wait_become_one_with_longer_runs() -> None:
    session = RouterSession("router")
    a, b = request(session, 1), request(session, 2)
    for step in range(5):
        session.tokens(step, a, output(1, step, 10 + step))
    session.tokens(5, b, output(2, 0, 99))
    (frame,) = await drained(session)
    assert frame.step == 5
    assert frame.outputs["r1"].run.token_ids == (10, 11, 12, 13, 14)
    assert len(frame.outputs["r1"].run.logprobs) == 5
    assert frame.outputs["r1"].cached_tokens == 7
    assert frame.outputs["r2"].run.token_ids == (99,)


async def test_an_answer_keeps_its_place_between_frames() -> None:
    session = RouterSession("router")
    a = request(session, 1)
    session.tokens(1, a, output(1, 0, 10))
    session.reply(a, ch.Ended(1, None))
    session.tokens(2, a, output(1, 1, 11))
    assert [type(i).__name__ for i in await drained(session)] == ["TokenFrame", "Reply", "TokenFrame"]


async def test_a_frame_that_was_given_out_grows_no_more() -> None:
    session = RouterSession("router")
    a = request(session, 1)
    session.tokens(1, a, output(1, 0, 10))
    outgoing = session.outgoing()
    first = await anext(outgoing)
    session.tokens(2, a, output(1, 1, 11))
    assert isinstance(first, TokenFrame)
    assert first.outputs["r1"].run.token_ids == (10,)
    assert (await anext(outgoing)).outputs["r1"].run.output_index == 1  # type: ignore[union-attr]


async def test_queued_tokens_of_a_cancelled_request_are_not_sent() -> None:
    session = RouterSession("router")
    a = request(session, 1)
    session.tokens(1, a, output(1, 0, 10))
    a.cancelled = True
    session.forget_tokens(a)
    session.tokens(2, a, output(1, 1, 11))
    assert await drained(session) == []


async def test_a_reader_that_waits_is_woken() -> None:
    session = RouterSession("router")
    a = request(session, 1)
    reading = asyncio.ensure_future(anext(session.outgoing()))
    await asyncio.sleep(0)
    session.tokens(1, a, output(1, 0, 10))
    assert isinstance(await asyncio.wait_for(reading, 20), TokenFrame)


async def test_the_beginning_of_an_answer_waits_for_no_gap(monkeypatch) -> None:
    monkeypatch.setattr(sessions, "GAP_S", 3600.0)
    session = RouterSession("router")
    session._gap_s = 3600.0
    a, b = request(session, 1), request(session, 2)
    outgoing = session.outgoing()
    session.tokens(1, a, output(1, 1, 10))
    await anext(outgoing)
    session.tokens(2, a, output(1, 2, 11))
    reading = asyncio.ensure_future(anext(outgoing))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not reading.done()
    session.tokens(2, b, output(2, 0, 99))
    frame = await asyncio.wait_for(reading, 20)
    assert {name: o.run.token_ids for name, o in frame.outputs.items()} == {"r1": (11,), "r2": (99,)}


async def test_where_steps_come_quick_frames_come_half_as_often() -> None:
    session = RouterSession("router")
    a = request(session, 1)
    outgoing = session.outgoing()
    for steps, gap in ((1, sessions.GAP_S), (3, sessions.WIDE_GAP_S), (2, sessions.GAP_S)):
        for step in range(steps):
            session.tokens(10 * steps + step, a, output(1, 10 * steps + step, 10))
        assert (await anext(outgoing)).steps == steps
        assert session._gap_s == gap


async def test_a_lost_engine_ends_every_request_and_then_the_session() -> None:
    session = RouterSession("router")
    request(session, 1), request(session, 2)
    session.lost(ErrorInfo("WorkerLost", "gone"))
    items = [item async for item in session.outgoing()]
    assert [(i.request_id, i.message.error.type) for i in items] == [("r1", "WorkerLost"), ("r2", "WorkerLost")]


def test_merging_keeps_the_first_index_and_the_last_word() -> None:
    last = ch.Output(1, TokenRun(1, (11,), (), "stop", 11), stations=(Station("decode", 1.0),))
    merged = merge(output(1, 0, 10), last)
    assert (merged.run.output_index, merged.run.finish_reason, merged.run.stop_token_id) == (0, "stop", 11)
    assert merged.stations == (Station("decode", 1.0),)
