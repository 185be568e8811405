"""Prefill workers that refuse, break and die: the request goes on elsewhere, after a pause where nobody is free."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from baton.protos.errors import (
    BatonError,
    Cancelled,
    CorruptFrame,
    LayoutMismatch,
    LeaseUnknown,
    PoolExhausted,
    WorkerLost,
)
from baton.router.dispatch import retries
from baton.router.dispatch.retries import PAUSE_S
from baton.router.request.weights import WeightsPin
from tests.router.dispatch.prompts import PROMPT, SHORT
from tests.router.fake_services import FakeDecode, answer_of
from tests.router.fake_workers import IMPATIENT, cluster, collect, until

# ---- prefill fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [CorruptFrame("bad"), WorkerLost("gone"), LeaseUnknown("closed")])
async def test_a_failed_prefill_rearms_with_the_next_epoch_and_goes_elsewhere(error):
    async with cluster(2, 1) as c:
        c.p[0].failures = [error]
        [stream] = c.open(PROMPT)
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert [r.epoch for r in c.p[0].requests] == [1]
        assert [r.epoch for r in c.p[1].requests] == [2]
        assert [r.epoch for r in c.d[0].rearms] == [2]
        assert len(c.d[0].admits) == 1
        assert (stream.summary.prefill_worker, stream.summary.attempts) == ("p1", 2)
        await c.idle()
        assert c.d[0].cancels == []


async def test_a_second_prefill_keeps_no_hold_on_the_weights_that_the_call_began_on():
    async with cluster(2, 1, settings=IMPATIENT) as c:
        c.p[0].failures, pin = [CorruptFrame("bad")], WeightsPin()
        c.p[1].hold.clear()
        [stream] = c.open(PROMPT, pin=pin)
        await until(lambda: c.p[1].requests)
        other = FakeDecode("d1")
        other.info = msgspec.structs.replace(other.info, fingerprint="of another checkpoint")
        await other.start()
        c.d.append(other)
        c.roster.join(other)
        await c.all_up()
        for worker in c.p:
            worker.decodes[other.info.address] = other
        await c.d[0].die()
        c.roster.entries.pop("d0", None)
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert stream.summary.decode_worker == "d1"
        c.p[1].hold.set()
        c.d[0].leases.clear()


async def test_blocks_received_before_a_retry_are_not_asked_for_again():
    async with cluster(2, 1) as c:
        c.p[0].hold.clear()
        [stream] = c.open(PROMPT)
        await until(lambda: c.p[0].requests)
        next(iter(c.d[0].leases.values())).received = [0, 1]
        c.p[0].failures = [CorruptFrame("bad")]
        c.p[0].hold.set()
        await collect(stream)
        assert list(c.p[1].requests[0].received_blocks) == [0, 1]


async def test_a_prefill_worker_that_dies_is_replaced_by_another():
    async with cluster(2, 1) as c:
        c.p[0].die_at_call = True
        c.p[0].hold.clear()
        [stream] = c.open(PROMPT)
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(PROMPT, 8)
        assert stream.summary.prefill_worker == "p1"
        await until(lambda: c.view.reachable("prefill") == 1)


async def test_the_only_prefill_workers_death_sends_the_request_the_local_way():
    async with cluster() as c:
        c.p[0].die_at_call = True
        c.p[0].hold.clear()
        [stream] = c.open(PROMPT)
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(PROMPT, 8)
        assert (stream.summary.way, stream.summary.attempts) == ("local", 2)
        await c.idle()
        assert [reason for _, reason in c.d[0].cancels] == ["retry"]


async def test_a_decode_worker_that_breaks_a_handoff_by_dying_is_one_failure_and_not_the_prefill_workers():
    async with cluster(1, 2) as c:
        c.d[0].dies_at_rearm = True
        c.p[0].failures = [WorkerLost("the decode worker ended the handoff early", "decode_address")]
        [stream] = c.open(PROMPT)
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(PROMPT, 8)
        assert (stream.summary.decode_worker, stream.summary.attempts) == ("d1", 2)
        c.d[0].leases.clear()
        await c.idle()


async def test_a_handoff_that_breaks_between_two_live_workers_goes_to_another_prefill_worker():
    async with cluster(2, 1) as c:
        c.p[0].failures = [WorkerLost("the decode worker ended the handoff early", "decode_address")]
        [stream] = c.open(PROMPT)
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(PROMPT, 8)
        assert (stream.summary.prefill_worker, stream.summary.attempts) == ("p1", 2)
        assert c.view.reachable("prefill") == 2
        await c.idle()


REFUSED = WorkerLost("nobody answers at 127.0.0.1:1: connection refused", "decode_address")


async def test_a_handoff_that_the_only_decode_worker_refuses_is_tried_again_after_growing_pauses():
    async with cluster() as c:
        c.p[0].failures = [REFUSED] * 2
        since = time.monotonic()
        [stream] = c.open(PROMPT)
        assert await asyncio.wait_for(collect(stream), 30) == answer_of(PROMPT, 8)
        assert time.monotonic() - since >= 3 * PAUSE_S[0]
        assert stream.summary.stations["queue"] >= 3 * PAUSE_S[0]
        assert (len(c.p[0].requests), stream.summary.attempts) == (3, 3)
        await c.idle()


async def test_a_decode_worker_that_refuses_requests_is_asked_again_after_growing_pauses():
    async with cluster() as c:
        c.d[0].refusals = [WorkerLost("the engine of d0 died")] * 2
        since = time.monotonic()
        [stream] = c.open(SHORT)
        assert await asyncio.wait_for(collect(stream), 30) == answer_of(SHORT, 8)
        assert time.monotonic() - since >= 3 * PAUSE_S[0]
        await c.idle()


@pytest.mark.parametrize("prefill", [1, 2])
async def test_a_refused_handoff_goes_elsewhere_without_a_pause(prefill: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "PAUSE_S", (1000.0, 1000.0))
    async with cluster(prefill, 2) as c:
        c.p[0].decodes = {c.d[1].info.address: c.d[1]}  # nobody answers at d0
        [stream] = c.open(PROMPT)
        assert await asyncio.wait_for(collect(stream), 30) == answer_of(PROMPT, 8)
        other = ("p0", "d1") if prefill == 1 else ("p1", "d0")
        assert (stream.summary.prefill_worker, stream.summary.decode_worker) == other
        assert (len(c.p[0].requests), stream.summary.attempts) == (3 - prefill, 2)
        await c.idle()


async def test_a_pause_ends_when_another_worker_is_ready(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "PAUSE_S", (1000.0, 1000.0))
    async with cluster() as c:
        c.d[0].refusals = [WorkerLost("the engine of d0 died")]
        [stream] = c.open(SHORT)
        await until(lambda: c.view._revision._waiters)
        c.d.append(FakeDecode("d1"))
        await c.d[1].start()
        c.roster.join(c.d[1])
        assert await asyncio.wait_for(collect(stream), 30) == answer_of(SHORT, 8)
        assert (stream.summary.decode_worker, len(c.d[0].admits)) == ("d1", 1)
        await c.idle()


async def test_a_cancel_in_a_pause_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "PAUSE_S", (1000.0, 1000.0))
    async with cluster() as c:
        c.p[0].failures = [REFUSED]
        [stream] = c.open(PROMPT)
        await until(lambda: c.view._revision._waiters)
        stream.cancel("client_gone")
        await c.idle()
        assert [reason for _, reason in c.d[0].cancels] == ["client_gone"]
        assert not c.view._revision._waiters


@pytest.mark.parametrize(
    "said",
    [WorkerLost("the engine of p0 died"), Cancelled("the server stops"), BatonError("Method not found!")],
    ids=["its engine died", "its server stops", "it has another role"],
)
async def test_a_prefill_worker_that_can_read_no_prompt_any_more_is_asked_once_while_it_ends(said):
    async with cluster() as c:
        c.p[0].hold.clear()
        [stream] = c.open(PROMPT)
        await until(lambda: c.p[0].requests)
        c.p[0].engine_died = said
        c.p[0].hold.set()
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(PROMPT, 8)
        assert len(c.p[0].requests) == 1
        assert (stream.summary.way, stream.summary.attempts) == ("local", 2)
        await c.idle()


async def test_the_successor_of_a_worker_that_failed_a_request_may_take_it():
    async with cluster(2, 1) as c:
        c.p[1].failures = [PoolExhausted("full")] * 10_000
        c.p[0].die_at_call = True
        c.p[0].hold.clear()
        [stream] = c.open(PROMPT)
        await until(lambda: c.p[1].requests)
        await until(lambda: c.view.reachable("prefill") == 1)
        c.p[0].die_at_call = False
        c.p[0].hold.set()
        await c.p[0].start()
        c.p[0].info = msgspec.structs.replace(c.p[0].info, incarnation="p0-2")
        c.roster.join(c.p[0])
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(PROMPT, 8)
        assert (stream.summary.prefill_worker, stream.summary.attempts) == ("p0", 2)
        await c.idle()


async def test_a_lost_reply_of_a_committed_prefill_changes_nothing():
    async with cluster() as c:
        c.p[0].lose_reply = True
        c.d[0].pace_s = 0.02
        [stream] = c.open(PROMPT)
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert len(c.d[0].rearms) == 1
        assert len(c.p[0].requests) == 1
        assert stream.summary.cached_tokens == 7
        await c.idle()


async def test_a_refused_rearm_admits_the_request_again():
    async with cluster(2, 1) as c:
        c.p[0].failures = [CorruptFrame("bad")]
        c.d[0].rearm_refusals = [LeaseUnknown("swept")]
        [stream] = c.open(PROMPT)
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert len(c.d[0].admits) == 2
        await c.idle()


async def test_an_error_that_no_retry_mends_is_raised_as_it_is():
    async with cluster(2, 1) as c:
        c.p[0].failures = [LayoutMismatch("float32 is not bfloat16")]
        [stream] = c.open(PROMPT)
        with pytest.raises(LayoutMismatch, match="bfloat16"):
            await collect(stream)
        await c.idle()
        assert len(c.d[0].cancels) == 1
        assert c.p[1].requests == []


async def test_after_three_failures_the_last_error_is_raised():
    async with cluster(3, 1) as c:
        for p in c.p:
            p.failures = [CorruptFrame("bad")] * 3
        [stream] = c.open(PROMPT)
        with pytest.raises(CorruptFrame):
            await collect(stream)
        assert sum(len(p.requests) for p in c.p) == 3
        await c.idle()


async def test_a_full_prefill_worker_is_asked_again_and_that_is_no_failure():
    async with cluster() as c:
        c.p[0].failures = [PoolExhausted("full")] * 4
        [stream] = c.open(PROMPT)
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert stream.summary.attempts == 1
        assert [r.epoch for r in c.p[0].requests] == [1, 2, 3, 4, 5]
