"""Requests that end early, in each phase: by a cancel, a deadline or the router's end."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.protos.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    PoolExhausted,
)
from baton.router.dispatch.choice_run import ChoiceRun
from baton.router.dispatch.runner import ChoiceRunner
from tests.router.dispatch.prompts import PROMPT, SHORT
from tests.router.fake_workers import (
    cluster,
    collect,
    until,
)

# ---- cancel and deadline -----------------------------------------------------------------------------


async def cancelled(stream) -> None:
    with pytest.raises(Cancelled, match="client_gone"):
        await collect(stream)


async def test_a_cancel_before_the_first_step_leaves_nothing():
    async with cluster() as c:
        [stream] = c.open(PROMPT)
        stream.cancel("client_gone")
        await cancelled(stream)
        await c.idle()
        assert c.d[0].admits == []


async def test_a_cancel_in_the_queue_sends_nothing():
    async with cluster(max_batch=1) as c:
        c.d[0].hold_tokens.clear()
        [first] = c.open(SHORT)
        await until(lambda: c.d[0].admits)
        [second] = c.open(SHORT)
        await asyncio.sleep(0.05)
        second.cancel("client_gone")
        await cancelled(second)
        c.d[0].hold_tokens.set()
        await collect(first)
        await c.idle()
        assert len(c.d[0].admits) == 1
        assert c.d[0].cancels == []


async def cancel_when(c, stream, phase) -> None:
    await until(phase)
    stream.cancel("client_gone")
    stream.cancel("client_gone")
    await cancelled(stream)
    await c.idle()
    assert [reason for _, reason in c.d[0].cancels] == ["client_gone"]


async def test_a_cancel_during_admission_sends_one_cancel():
    async with cluster() as c:
        c.d[0].hold_admits.clear()
        [stream] = c.open(PROMPT)
        await cancel_when(c, stream, lambda: c.d[0].admits)


async def test_a_cancel_during_prefill_ends_the_call_and_sends_one_cancel():
    async with cluster() as c:
        c.p[0].hold.clear()
        [stream] = c.open(PROMPT)
        await cancel_when(c, stream, lambda: c.p[0].running)
        assert c.p[0].cancelled == 1


async def test_a_cancel_during_the_transfer_ends_the_call_and_sends_one_cancel():
    async with cluster() as c:
        c.p[0].reply_after_s = 5
        c.d[0].hold_tokens.clear()
        [stream] = c.open(PROMPT)
        await cancel_when(c, stream, lambda: any(lease.committed for lease in c.d[0].leases.values()))
        assert c.p[0].cancelled == 1


@pytest.mark.parametrize("prompt", [PROMPT, SHORT], ids=["prefill", "local"])
async def test_a_cancel_during_decode_sends_one_cancel(prompt):
    async with cluster() as c:
        c.d[0].pace_s = 0.02
        [stream] = c.open(prompt, max_tokens=1000)
        await cancel_when(c, stream, lambda: len(stream.emitted) > 3)
        assert c.p[0].cancelled == 0


async def test_a_cancel_while_a_second_prefill_is_awaited_sends_one_cancel():
    async with cluster() as c:
        c.p[0].failures = [PoolExhausted("full")] * 1000
        [stream] = c.open(PROMPT)
        await cancel_when(c, stream, lambda: len(c.p[0].requests) > 2)


@pytest.mark.parametrize(("tokens", "calls"), [(4, 0), (0, 1)], ids=["decode", "prefill"])
async def test_a_deadline_ends_the_call_and_is_told_to_the_worker(tokens: int, calls: int):
    async with cluster() as c:
        c.d[0].stall_after(4)
        if not tokens:
            c.p[0].hold.clear()
        for seconds in (0.5, 5.0, 50.0):  # the longer ones on a machine on which it passed before
            c.p[0].cancelled = 0
            c.p[0].requests.clear()
            c.d[0].cancels.clear()
            [stream] = c.open(PROMPT, max_tokens=1000, deadline=time.monotonic() + seconds)
            with pytest.raises(DeadlineExceeded):
                await collect(stream)
            await c.idle()
            if len(stream.emitted) >= tokens and c.p[0].requests:
                break  # else it came too late for what is asked of the worker
        assert (len(stream.emitted), c.p[0].cancelled) == (tokens, calls)
        assert [reason for _, reason in c.d[0].cancels] == ["deadline"]


async def test_a_part_that_times_out_ends_a_request_without_a_deadline(monkeypatch: pytest.MonkeyPatch):
    async def late(runner: ChoiceRunner, run: ChoiceRun) -> None:
        raise TimeoutError

    monkeypatch.setattr(ChoiceRunner, "_serve", late)
    async with cluster() as c:
        [stream] = c.open(SHORT)
        with pytest.raises(DeadlineExceeded, match="within its time"):
            await collect(stream)
        await c.idle()


async def test_a_deadline_in_the_queue_or_in_the_past_is_exceeded():
    async with cluster(max_batch=1) as c:
        c.d[0].hold_tokens.clear()
        [first] = c.open(SHORT)
        await until(lambda: c.d[0].admits)
        for deadline in (time.monotonic() + 0.1, time.monotonic() - 1):
            [stream] = c.open(SHORT, deadline=deadline)
            with pytest.raises(DeadlineExceeded):
                await collect(stream)
        first.cancel("client_gone")
        await c.idle()


async def test_the_time_of_one_that_can_wait_begins_when_it_is_placed():
    """A batch job's line that waited for an hour would otherwise be answered with a 504 for good."""
    async with cluster(max_batch=1) as c:
        c.d[0].hold_tokens.clear()
        [first] = c.open(SHORT)
        await until(lambda: c.d[0].admits)
        [late] = c.open(SHORT, request_id="late", deadline=time.monotonic() + 0.1, can_wait=True)
        await asyncio.sleep(0.3)
        assert c.dispatcher.queued() == 1
        first.cancel("client_gone")
        with pytest.raises(DeadlineExceeded, match=r"within 0\.0\d+ s"):  # its worker gives no tokens
            await collect(late)
        await c.idle()


async def test_a_router_that_closes_cancels_what_runs_and_takes_nothing_new():
    async with cluster() as c:
        c.d[0].hold_tokens.clear()
        [stream] = c.open(SHORT)
        await until(lambda: c.d[0].admits)
        await c.dispatcher.close()
        with pytest.raises(Draining):
            await collect(stream)
        with pytest.raises(Draining):
            c.open(SHORT)
        await c.idle()
        assert [reason for _, reason in c.d[0].cancels] == ["shutdown"]
