"""A request outlives its workers: drained, stalled and slow ones. The answer is the same, to the token."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from baton.protos.errors import InvalidRequest, RequestBlamed
from baton.router.workers import link
from tests.router.fake_services import answer_of
from tests.router.fake_workers import PATIENT, cluster, collect, until

PROMPT, SHORT = tuple(range(40)), (1, 2, 3)


async def _begin(c, count: int = 1, **fields) -> tuple[list, list[list[int]]]:
    """Requests that have a token, and get no other before ``_go_on``."""
    streams, got = [], []
    for d in c.d:
        d.stall_after(1)
    for i in range(count):
        found = c.open(PROMPT, 20, request_id=f"r{i}", **fields)
        streams += found
    for stream in streams:
        run = await anext(stream)
        got.append(list(run.token_ids))
    return streams, got


def _go_on(c) -> None:
    for d in c.d:
        d.hold_tokens.set()


async def _rest(streams, got) -> list[list[int]]:
    for stream, ids in zip(streams, got, strict=True):
        async for run in stream:
            ids += run.token_ids
    return got


async def test_draining_a_decode_worker_moves_its_requests_and_none_fails():
    async with cluster(1, 2) as c:
        streams, got = await _begin(c, 4)
        left = c.d[0]
        moved = len(left.leases)
        assert moved > 0
        left.info = msgspec.structs.replace(left.info, state="draining")
        c.roster.join(left)
        await until(lambda: not left.leases)
        _go_on(c)
        assert await _rest(streams, got) == [answer_of(PROMPT, 20)] * 4
        assert len(left.cancels) == moved
        assert {s.summary.decode_worker for s in streams} == {"d1"}
        assert all(s.summary.attempts <= 2 for s in streams)
        await c.idle()


async def test_a_lone_decode_worker_that_drains_finishes_what_it_has():
    async with cluster(1, 1) as c:
        streams, got = await _begin(c)
        c.d[0].info = msgspec.structs.replace(c.d[0].info, state="draining")
        c.roster.join(c.d[0])
        await until(
            lambda: all(link.info.state == "draining" for link in c.view._links if link.info.role == "decode")
        )
        _go_on(c)
        assert await _rest(streams, got) == [answer_of(PROMPT, 20)]
        assert c.d[0].cancels == []


async def test_every_choice_of_a_request_moves():
    async with cluster(1, 2) as c:
        streams, got = await _begin(c, 1, n=3)
        [home] = [d for d in c.d if d.leases]
        home.info = msgspec.structs.replace(home.info, state="draining")
        c.roster.join(home)
        await until(lambda: not home.leases)
        _go_on(c)
        assert await _rest(streams, got) == [answer_of(PROMPT, 20, choice) for choice in range(3)]
        await c.idle()


async def test_a_decode_worker_whose_engine_stands_still_is_left_within_its_limit(monkeypatch):
    monkeypatch.setattr(link, "PROBE_EVERY_S", 0.02)
    async with cluster(1, 2) as c:
        streams, got = await _begin(c, 2)
        still, other = c.d if c.d[0].leases else c.d[::-1]
        await c.silence(still)
        other.hold_tokens.set()
        assert await _rest(streams, got) == [answer_of(PROMPT, 20)] * 2
        assert c.view.reachable("decode") == 1
        await c.idle()
        still.hold_tokens.set()
        still.hold_engine.set()
        await until(lambda: c.view.reachable("decode") == 2)


async def test_a_prefill_worker_whose_engine_stands_still_is_left_within_its_limit(monkeypatch):
    monkeypatch.setattr(link, "PROBE_EVERY_S", 0.02)
    async with cluster(2, 1) as c:
        c.p[0].hold.clear()
        c.p[1].hold.clear()
        streams = c.open(PROMPT, 8)
        await until(lambda: c.p[0].running + c.p[1].running == 1)
        still, other = (c.p[0], c.p[1]) if c.p[0].running else (c.p[1], c.p[0])
        await c.silence(still)
        other.hold.set()
        assert await collect(streams[0]) == answer_of(PROMPT, 8)
        assert streams[0].summary.prefill_worker == other.info.worker_id
        still.hold.set()
        still.hold_engine.set()
        await c.idle()


async def test_a_request_whose_second_engine_falls_silent_is_blamed_and_given_to_no_third(monkeypatch):
    monkeypatch.setattr(link, "PROBE_EVERY_S", 0.02)
    async with cluster(0, 3) as c:
        for d in c.d:
            d.hold_tokens.clear()
        [stream] = c.open(SHORT, 8)
        for _ in range(2):
            await until(lambda: any(d.leases and d.hold_engine.is_set() for d in c.d))
            await c.silence(next(d for d in c.d if d.leases and d.hold_engine.is_set()))
        with pytest.raises(RequestBlamed, match="2 workers' engines"):
            await collect(stream)
        assert sorted(len(d.admits) for d in c.d) == [0, 1, 1]
        for d in c.d:
            d.hold_engine.set()
            d.hold_tokens.set()
        await c.idle()


async def test_a_silent_engine_that_had_given_a_request_tokens_is_no_mark_against_it(monkeypatch):
    monkeypatch.setattr(link, "PROBE_EVERY_S", 0.02)
    async with cluster(0, 3) as c:
        for d in c.d:
            d.stall_after(1)
        [stream] = c.open(SHORT, 20)
        got = [list((await anext(stream)).token_ids)]
        for given in (1, 2):
            await until(lambda given=given: len(stream.emitted) == given)
            await c.silence(next(d for d in c.d if d.leases and d.hold_engine.is_set()))
        await until(lambda: len(stream.emitted) == 3)
        _go_on(c)
        assert await _rest([stream], got) == [answer_of(SHORT, 20)]
        assert stream.summary.attempts == 3
        for d in c.d:
            d.hold_engine.set()
            d.hold_tokens.set()
        await c.idle()


async def test_a_request_that_a_worker_refuses_for_what_it_is_goes_to_no_other():
    async with cluster(0, 2) as c:
        for d in c.d:
            d.refusals += [InvalidRequest("the grammar is too complex", "grammar")]
        [stream] = c.open(SHORT, 8)
        with pytest.raises(InvalidRequest, match="too complex"):
            await collect(stream)
        assert sorted(len(d.admits) for d in c.d) == [0, 1]


async def test_a_slow_prefill_is_taken_over_by_another_worker_once():
    hedging = msgspec.structs.replace(PATIENT, hedge_factor=2.0, hedge_least_s=0.05)
    async with cluster(2, 1, settings=hedging, policy="cost", local_max=0) as c:
        c.p[0].hold.clear()
        c.p[1].hold.clear()
        [stream] = c.open(PROMPT, 8)
        await until(lambda: c.p[0].running + c.p[1].running == 1)
        slow, other = (c.p[0], c.p[1]) if c.p[0].running else (c.p[1], c.p[0])
        await until(lambda: other.running == 1)
        await until(lambda: slow.running == 0)
        assert len(c.d[0].rearms) == 1
        await asyncio.sleep(0.15)
        assert other.running == 1  # once: however long this one takes
        other.hold.set()
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert (stream.summary.prefill_worker, stream.summary.attempts) == (other.info.worker_id, 2)
        await c.idle()


async def test_without_another_worker_a_slow_prefill_is_waited_for():
    hedging = msgspec.structs.replace(PATIENT, hedge_factor=1.0, hedge_least_s=0.02)
    async with cluster(1, 1, settings=hedging, policy="cost", local_max=0) as c:
        c.p[0].reply_after_s = 0.2
        [stream] = c.open(PROMPT, 8)
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert c.d[0].rearms == []
