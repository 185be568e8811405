"""A request's way against workers that speak gRPC and misbehave on command."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from baton.cluster.prefix_index import HASH_BYTES
from baton.protos.errors import (
    BatonError,
    Cancelled,
    ContextTooLong,
    CorruptFrame,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LayoutMismatch,
    LeaseUnknown,
    ModelNotFound,
    NoWorker,
    Overloaded,
    PoolExhausted,
    WorkerLost,
)
from baton.protos.nouns import BLOCK_TOKENS, Sampling
from baton.router.dispatch import retries
from baton.router.dispatch.choice_run import ChoiceRun
from baton.router.dispatch.retries import PAUSE_S
from baton.router.dispatch.runner import ChoiceRunner
from baton.router.request.request import RouterRequest
from tests.router.fake_workers import (
    PATIENT,
    FakeDecode,
    FakeIndex,
    answer_of,
    cluster,
    collect,
    collect_beyond,
    until,
)

PROMPT = tuple(range(40))
SHORT = (1, 2, 3)


# ---- the plain way -----------------------------------------------------------------------------------


async def test_a_long_prompt_is_prefilled_elsewhere_and_every_token_comes_once():
    async with cluster() as c:
        [stream] = c.open(PROMPT)
        assert await collect(stream) == answer_of(PROMPT, 8)
        s = stream.summary
        assert (s.way, s.prefill_worker, s.decode_worker, s.attempts) == ("prefill", "p0", "d0", 1)
        assert (s.finish_reason, s.prompt_tokens, s.completion_tokens, s.cached_tokens) == ("length", 40, 8, 7)
        stations = {"queue", "prefill_queue", "prefill", "transfer", "first_decode", "decode", "ttft"}
        assert stations == s.stations.keys()
        assert (s.stations["prefill"], s.stations["transfer"]) == (0.2, 0.3)
        assert s.context_class == "short"
        await c.idle()
        assert c.d[0].cancels == []


async def test_a_short_prompt_goes_the_local_way():
    async with cluster() as c:
        [stream] = c.open(SHORT)
        assert await collect(stream) == answer_of(SHORT, 8)
        assert (stream.summary.way, stream.summary.prefill_worker) == ("local", "")
        assert stream.summary.cached_tokens == 7 - 4  # never more than the prompt has
        assert c.p[0].requests == []
        await c.idle()


async def test_a_long_prompt_with_a_cached_prefix_goes_the_local_way():
    async with cluster(index=FakeIndex({"d0": 2}), local_max=8) as c:
        [stream] = c.open(PROMPT)
        await collect(stream)
        assert stream.summary.way == "local"
        assert len(stream.summary.chain) == HASH_BYTES * (len(PROMPT) // BLOCK_TOKENS)


async def test_a_cluster_of_decode_workers_alone_answers_everything():
    async with cluster(prefill=0) as c:
        [stream] = c.open(PROMPT)
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert stream.summary.way == "local"


async def test_an_answer_of_one_token_ends_with_the_prefills_reply():
    async with cluster() as c:
        c.d[0].hold_tokens.clear()
        [stream] = c.open(PROMPT, max_tokens=1)
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(PROMPT, 1)
        assert stream.summary.stations["transfer"] == 0.3
        stream.cancel("client_gone")  # an ended stream is left alone: the worker ends it by itself
        c.d[0].hold_tokens.set()
        await c.idle()
        assert c.d[0].cancels == []


async def test_frames_that_overlap_the_first_token_are_cut():
    async with cluster() as c:
        c.d[0].per_frame = 3
        [stream] = c.open(PROMPT, max_tokens=8)
        assert await collect(stream) == answer_of(PROMPT, 8)


async def test_usage_is_whole_even_when_the_answer_overtakes_the_prefills_reply():
    async with cluster() as c:
        c.p[0].reply_after_s = 0.2
        [stream] = c.open(PROMPT, max_tokens=3)
        assert await collect(stream) == answer_of(PROMPT, 3)
        assert stream.summary.stations["prefill"] == 0.2
        await c.idle()


async def test_many_requests_at_once_each_get_their_own_answer():
    async with cluster(2, 2) as c:
        prompts = [tuple(range(i, i + 5 + i % 40)) for i in range(100)]
        streams = [c.open(p, request_id=f"r{i % 7}")[0] for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*(collect(s) for s in streams))
        assert answers == [answer_of(p, 8) for p in prompts]
        await c.idle()


async def test_further_choices_follow_the_first_to_its_decode_worker():
    async with cluster(1, 3) as c:
        streams = c.open(PROMPT, n=4)
        answers = await asyncio.gather(*(collect(s) for s in streams))
        assert answers == [answer_of(PROMPT, 8, choice) for choice in range(4)]
        assert len({s.summary.decode_worker for s in streams}) == 1
        assert [s.summary.way for s in streams] == ["prefill", "local", "local", "local"]
        await c.idle()


async def test_further_choices_go_on_when_the_first_is_cancelled_before_it_was_placed():
    async with cluster() as c:
        c.p[0].hold.clear()
        first, second = c.open(PROMPT, n=2)
        await until(lambda: c.p[0].requests)
        first.cancel("stop_string")
        c.p[0].hold.set()
        assert await collect(second) == answer_of(PROMPT, 8, 1)
        await c.idle()


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


IMPATIENT = msgspec.structs.replace(PATIENT, worker_wait_s=0.3)


async def test_the_last_decode_workers_death_is_a_typed_error_after_a_short_wait():
    async with cluster(settings=IMPATIENT) as c:
        c.d[0].stall_after(3)
        [stream] = c.open(SHORT)
        with pytest.raises(NoWorker):
            await asyncio.wait_for(collect_beyond(stream, c.d[0], 3), 60)
        assert stream.emitted == answer_of(SHORT, 3)
        c.d[0].leases.clear()
        await c.idle()


# ---- no room -----------------------------------------------------------------------------------------


async def test_a_refusal_for_want_of_pages_tries_elsewhere_at_once():
    async with cluster(1, 2) as c:
        c.d[0].refusals = [PoolExhausted("full")] * 50
        [stream] = c.open(PROMPT)
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert (stream.summary.decode_worker, stream.summary.attempts) == ("d1", 1)
        await c.idle()


async def test_requests_that_find_no_pages_wait_without_losing_their_place():
    async with cluster() as c:
        c.d[0].refusals = [PoolExhausted("full")] * 3
        done: list[int] = []
        streams = [c.open((i, i, i))[0] for i in range(3)]

        async def run(i: int) -> None:
            assert await collect(streams[i]) == answer_of((i, i, i), 8)
            done.append(i)

        await asyncio.gather(*(run(i) for i in range(3)))
        assert [a.token_ids[0] for a in c.d[0].admits][-3:] == [0, 1, 2]
        await c.idle()


async def test_a_tight_worker_is_asked_by_one_at_a_time_in_the_queues_order():
    async with cluster(settings=msgspec.structs.replace(PATIENT, full_wait_s=300.0)) as c:
        c.d[0].pages_free = 2
        c.d[0].pace_s = 0.005
        streams = [c.open((i, i, i))[0] for i in range(12)]
        await asyncio.gather(*(collect(s) for s in streams))
        granted = [a.token_ids[0] for a in c.d[0].admits if a.request_id in c.d[0].granted]
        assert granted == sorted(granted)
        assert len(c.d[0].admits) < 12 + 10 + 12
        await c.idle()


async def test_the_end_of_a_request_wakes_those_that_wait_for_its_pages():
    async with cluster(settings=msgspec.structs.replace(PATIENT, full_wait_s=300.0)) as c:
        c.d[0].stall_after(1)
        [first] = c.open(SHORT)
        await anext(first)
        c.d[0].refusals = [PoolExhausted("full")]
        [second] = c.open(SHORT)
        await until(lambda: not c.d[0].refusals)
        c.d[0].hold_tokens.set()
        await asyncio.wait_for(asyncio.gather(collect(second), drain(first)), 60)
        await c.idle()


async def drain(stream) -> None:
    async for _ in stream:
        pass


async def test_a_prompt_that_no_pool_could_hold_is_refused_by_name():
    async with cluster(pages=2) as c:
        [stream] = c.open(PROMPT)
        with pytest.raises(ContextTooLong, match=r"40 tokens: .* holds 32 tokens; shorten it by .* 8") as told:
            await collect(stream)
        assert told.value.param == "prompt"
        await c.idle()


async def test_a_full_queue_is_overloaded_with_a_time_to_come_back():
    async with cluster(max_queue=3, max_batch=1) as c:
        c.d[0].hold_tokens.clear()
        streams = [c.open(SHORT)[0]]
        await until(lambda: c.d[0].admits)
        streams += [c.open(SHORT)[0] for _ in range(3)]
        with pytest.raises(Overloaded) as caught:
            c.open(SHORT)
        assert caught.value.retry_after_s >= 1
        c.d[0].hold_tokens.set()
        assert await asyncio.gather(*(collect(s) for s in streams)) == [answer_of(SHORT, 8)] * 4
        assert c.d[0].most == 1
        await c.idle()


async def test_long_prompts_wait_in_the_router_until_a_prefill_is_imminent():
    prompt = tuple(range(500)) * 4  # 2,000 tokens; a worker is handed 4,096 ahead
    async with cluster() as c:
        c.p[0].hold.clear()
        streams = [c.open(prompt)[0] for _ in range(6)]
        await until(lambda: (c.p[0].running, len(c.d[0].leases)) == (2, 2))
        await asyncio.sleep(0.2)
        assert (c.p[0].running, len(c.d[0].leases)) == (2, 2), "no more than that"
        c.p[0].hold.set()
        await asyncio.gather(*(collect(s) for s in streams))
        await c.idle()


# ---- nobody there ------------------------------------------------------------------------------------


async def test_without_any_worker_the_error_comes_after_a_short_wait():
    async with cluster(0, 0, settings=IMPATIENT) as c:
        [stream] = c.open(PROMPT)
        started = time.monotonic()
        with pytest.raises(NoWorker):
            await collect(stream)
        assert time.monotonic() - started > 0.2
        assert not c.dispatcher.ready()
        await c.idle()


async def test_a_request_that_finds_no_decode_worker_is_told_which_one_left_last_and_why():
    def last_words(role: str, model_id: str) -> str:
        return f"the last {role} worker of {model_id} died of hunger"

    async with cluster(0, 0, settings=IMPATIENT, last_words=last_words) as c:
        [stream] = c.open(PROMPT)
        with pytest.raises(NoWorker, match="can be reached; the last decode worker of m died of hunger; is one"):
            await collect(stream)


async def test_a_model_that_nobody_serves_is_not_found():
    async with cluster() as c:
        with pytest.raises(ModelNotFound, match="there is m"):
            c.dispatcher.open(RouterRequest("r", "other", SHORT, Sampling()))
        assert [m.model_id for m in c.dispatcher.models()] == ["m"]
        await c.idle()


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


async def test_a_hole_in_an_answer_fails_that_request_alone():
    async with cluster() as c:
        c.d[0].hold_tokens.clear()
        [bad], [good] = c.open(SHORT), c.open((9, 9))
        await until(lambda: len(c.d[0].leases) == 2)
        c.d[0]._run = skipping(c.d[0]._run, bad_prompt=SHORT)
        c.d[0].hold_tokens.set()
        with pytest.raises(BatonError, match="hole"):
            await collect(bad)
        assert await collect(good) == answer_of((9, 9), 8)
        await c.idle()


def skipping(run, bad_prompt):
    def skip(admit, tokens):
        made = run(admit, tokens)
        if tuple(admit.token_ids) == bad_prompt and made.output_index >= 2:
            made.output_index += 1
        return made

    return skip


async def test_a_workers_word_about_bad_input_reaches_the_caller():
    async with cluster() as c:
        c.d[0].refusals = [InvalidRequest("ids are below 1000", "prompt")]
        [stream] = c.open(SHORT)
        with pytest.raises(InvalidRequest) as caught:
            await collect(stream)
        assert caught.value.param == "prompt"
        await c.idle()


async def test_the_callers_trace_goes_all_the_way_down():
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with cluster() as c:
        await collect(c.open(PROMPT, traceparent=trace)[0])
        assert c.d[0].admits[0].traceparent[:35] == trace[:35]
        assert c.p[0].requests[0].traceparent[:35] == trace[:35]


async def test_decisions_and_second_tries_are_counted():
    async with cluster(2, 1) as c:
        c.p[0].failures = [CorruptFrame("bad")]
        await collect(c.open(PROMPT)[0])
        value = c.metrics.registry.get_sample_value
        assert value("baton_request_retries_total", {"cause": "corrupt_frame"}) == 1
        assert value("baton_routing_decisions_total", {"way": "prefill", "worker": "p1"}) == 1
        assert value("baton_workers", {"role": "prefill"}) == 2
        assert value("baton_requests_queued", {"model": "m", "context_class": "short"}) == 0
