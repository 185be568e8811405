"""A request's way against workers that speak gRPC and misbehave on command."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.cluster.prefix_index import HASH_BYTES
from baton.protos.errors import (
    BatonError,
    CorruptFrame,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
)
from baton.protos.nouns import BLOCK_TOKENS, Sampling
from baton.router.request.request import RouterRequest
from tests.router.dispatch.prompts import PROMPT, SHORT
from tests.router.fake_services import answer_of
from tests.router.fake_workers import IMPATIENT, FakeIndex, cluster, collect, until

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
