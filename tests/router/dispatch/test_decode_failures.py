"""Decode workers that break and die: the answer is continued on another one, or ends with a typed error."""

from __future__ import annotations

import asyncio

import pytest

from baton.protos.errors import (
    BatonError,
    LeaseUnknown,
    NoWorker,
    WorkerLost,
)
from tests.router.dispatch.prompts import PROMPT, SHORT
from tests.router.fake_services import answer_of
from tests.router.fake_workers import IMPATIENT, cluster, collect, collect_beyond, until

# ---- decode fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, SHORT], ids=["prefill", "local"])
async def test_a_lost_decode_worker_is_replaced_and_the_stream_goes_on(prompt):
    async with cluster(1, 2) as c:
        c.d[0].stall_after(3)
        [stream] = c.open(prompt)
        assert await collect_beyond(stream, c.d[0], 3) == answer_of(prompt, 8)
        [again] = c.d[1].admits
        assert tuple(again.token_ids[: len(prompt)]) == prompt
        assert again.prompt_tokens == len(prompt)
        assert list(again.token_ids[len(prompt) :]) == answer_of(prompt, 3)
        assert (stream.summary.decode_worker, stream.summary.attempts) == ("d1", 2)
        c.d[0].leases.clear()
        await c.idle()


async def test_an_answer_whose_worker_dies_after_the_last_token_it_may_have_is_whole():
    async with cluster(1, 2) as c:
        c.d[0].stall_after(7)
        c.d[0].ends_late = True
        [stream] = c.open(SHORT, max_tokens=7)
        assert await collect_beyond(stream, c.d[0], 7) == answer_of(SHORT, 7)
        assert (stream.summary.finish_reason, c.d[1].admits) == ("length", [])
        c.d[0].leases.clear()
        await c.idle()


async def test_an_answer_that_ends_early_with_a_passing_error_is_continued_elsewhere():
    async with cluster(1, 2) as c:
        c.d[0].end_with = [LeaseUnknown("swept")]
        [stream] = c.open(SHORT)
        assert await collect(stream) == answer_of(SHORT, 8)
        assert stream.summary.decode_worker == "d1"
        await c.idle()
        assert c.d[0].cancels == []


async def test_an_answer_that_ends_with_a_lasting_error_raises_it():
    async with cluster() as c:
        c.d[0].end_with = [BatonError("a bad sequence")]
        [stream] = c.open(SHORT)
        with pytest.raises(BatonError, match="a bad sequence"):
            await collect(stream)
        await c.idle()


async def test_the_only_decode_worker_whose_engine_died_is_asked_again_once_it_answers_a_probe():
    async with cluster() as c:
        c.d[0].hold_tokens.clear()
        [stream] = c.open(SHORT)
        await until(lambda: c.d[0].leases)
        c.d[0].engine_died = WorkerLost("the engine of d0 died")
        c.d[0].end_with = [c.d[0].engine_died]
        c.d[0].hold_tokens.set()
        await until(lambda: c.view.reachable("decode") == 0)
        c.d[0].engine_died = None
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(SHORT, 8)
        assert (len(c.d[0].admits), stream.summary.attempts) == (2, 2)
        await c.idle()


async def test_a_decode_worker_that_answers_a_probe_keeps_its_session_whatever_it_said_of_itself():
    async with cluster() as c:
        c.d[0].end_with = [WorkerLost("the engine of d0 died")]
        [stream] = c.open(SHORT)
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(SHORT, 8)
        assert (c.d[0].sessions, stream.summary.attempts) == (1, 2)
        await c.idle()


async def test_a_worker_killed_during_admission_is_replaced():
    async with cluster(1, 2) as c:
        c.d[0].hold_admits.clear()
        [stream] = c.open(PROMPT)
        await until(lambda: c.d[0].admits)
        await c.d[0].die()
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(PROMPT, 8)
        c.d[0].leases.clear()
        await c.idle()


async def test_a_worker_lost_while_prefill_runs_cancels_that_prefill():
    async with cluster(1, 2) as c:
        c.p[0].hold.clear()
        [stream] = c.open(PROMPT)
        await until(lambda: c.p[0].requests)
        await c.d[0].die()
        await until(lambda: c.p[0].cancelled == 1)
        c.p[0].hold.set()
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert stream.summary.decode_worker == "d1"
        c.d[0].leases.clear()
        await c.idle()


async def test_the_last_decode_workers_death_is_a_typed_error_after_a_short_wait():
    async with cluster(settings=IMPATIENT) as c:
        c.d[0].stall_after(3)
        [stream] = c.open(SHORT)
        with pytest.raises(NoWorker):
            await asyncio.wait_for(collect_beyond(stream, c.d[0], 3), 60)
        assert stream.emitted == answer_of(SHORT, 3)
        c.d[0].leases.clear()
        await c.idle()
