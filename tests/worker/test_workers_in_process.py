"""A prefill and a decode worker in one event loop: every way of a request, and whatever breaks."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.cluster.metering import telemetry
from baton.decode_worker.io import service as decode_service
from baton.prefill_worker.io import service as prefill_service
from baton.protos import channel as ch
from baton.protos.errors import Draining, StaleEpoch, WorkerLost
from tests.thorough import first_now
from tests.worker.house import Chaos, house, oracle, prompt_of, request


async def test_every_way_gives_the_answer_that_the_request_has_alone() -> None:
    async with house() as h:
        requests = [request(f"r{n}", prompt_of(n, n % 3), max_tokens=1 + n % 9) for n in range(1, 200, 13)]
        answers = await asyncio.gather(*(h.answer(r, local=i % 3 == 0) for i, r in enumerate(requests)))
        assert answers == [oracle(r) for r in requests]
        assert await h.settles()


async def test_choices_after_the_first_find_its_blocks_on_the_decode_worker() -> None:
    async with house() as h:
        choices = [request(f"c{i}", prompt_of(100), i, temperature=1.0, seed=5) for i in range(4)]
        assert await h.answer(choices[0]) == oracle(choices[0])
        for choice in choices[1:]:
            admitted = await h.admit(choice, local=True)
            assert admitted.held_blocks == 6
            await h.router.finished[choice.request_id].wait()
            assert h.router.tokens[choice.request_id] == oracle(choice)
        assert await h.settles()


async def test_a_second_prefill_after_a_rearm_ships_only_what_is_missing() -> None:
    async with house() as h:
        r = request("r", prompt_of(500))
        admitted = await h.admit(r)
        first = asyncio.ensure_future(h.prefill.prefill(h.call(r, admitted)))
        while h.intake.received_blocks < 5:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        h.decode.rearm(h.router.session, "r", admitted.lease, 2)
        rearmed = await h.router.said["r"].get()
        assert len(rearmed.received_blocks) >= 5
        with pytest.raises(StaleEpoch):
            await h.prefill.prefill(h.call(r, admitted))
        result = await h.prefill.prefill(h.call(r, admitted, 2, rearmed.received_blocks))
        assert result.shipped_blocks == 32 - len(rearmed.received_blocks)
        await h.router.finished["r"].wait()
        assert h.router.tokens["r"] == oracle(r)
        assert await h.settles()


async def test_a_closed_session_leaves_nothing_behind() -> None:
    async with house() as h:
        requests = [request(f"r{n}", prompt_of(100, n), max_tokens=400) for n in range(6)]
        leases = [await h.admit(r, local=i % 2 == 0) for i, r in enumerate(requests)]
        calls = [asyncio.ensure_future(h.prefill.prefill(h.call(requests[i], leases[i]))) for i in (1, 3, 5)]
        await asyncio.sleep(0.003)
        h.decode.close_session(h.router.session)
        await asyncio.gather(*calls, return_exceptions=True)
        assert await h.settles()


@pytest.mark.parametrize(("pages", "seed"), first_now([(60, 1), (300, 3), (60, 2), (300, 4)], 2))
async def test_whatever_breaks_answers_are_right_and_both_pools_come_back(pages: int, seed: int) -> None:
    async with house(pages) as h:
        chaos = Chaos(h, seed)
        await asyncio.gather(*(chaos.client(n) for n in range(150)))
        assert await h.settles()
        assert chaos.good > 20  # of 150, fewer the busier the machine
        assert chaos.gone > 10
        assert chaos.rearmed > 2
        assert h.d.loop.leases_swept == 0


async def test_a_request_id_can_be_used_again_at_once_after_its_cancel() -> None:
    async with house() as h:
        r = request("same", prompt_of(100), max_tokens=50)
        await h.admit(r, local=True)
        h.decode.cancel(h.router.session, "same", "retry")
        assert await h.answer(r, local=True) == oracle(r)
        assert await h.settles()


async def test_a_cancel_that_crosses_the_last_token_is_answered_all_the_same() -> None:
    async with house() as h:
        await h.admit(request("r", prompt_of(20), max_tokens=3), local=True)
        while h.d.loop.requests:
            await asyncio.sleep(0)
        assert any(isinstance(m, ch.Tokens) for m in h.d.outbox), "the last token is on its way"
        h.decode.cancel(h.router.session, "r", "client_gone")
        assert isinstance(await h.router.said["r"].get(), ch.Ended)
        assert await h.settles()


async def test_a_request_id_that_is_in_use_is_refused() -> None:
    async with house() as h:
        r = request("same", prompt_of(100), max_tokens=500)
        await h.admit(r, local=True)
        h.decode.admit(h.router.session, r, "m", True, 0.0, "")
        assert (await h.router.said["same"].get()).error.param == "request_id"


async def test_a_cancel_right_after_admit_closes_the_intake_for_good() -> None:
    async with house() as h:
        r = request("r", prompt_of(100))
        h.router.expect("r")
        h.decode.admit(h.router.session, r, "m", False, 0.0, "")
        h.decode.cancel(h.router.session, "r", "client_gone")
        assert isinstance(await h.router.said["r"].get(), ch.Ended)
        assert not h.intake._by_key
        assert await h.settles()


async def test_another_model_is_refused_by_name() -> None:
    async with house() as h:
        h.router.expect("r")
        h.decode.admit(h.router.session, request("r", [1]), "other", True, 0.0, "")
        assert (await h.router.said["r"].get()).error.type == "ModelNotFound"


async def test_spans_of_both_workers_hang_under_the_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for module in (prefill_service, decode_service):
        tracer = provider.get_tracer("test")
        monkeypatch.setattr(
            module,
            "open_span",
            lambda n, t, a, tracer=tracer: tracer.start_span(n, telemetry._context(t), attributes=a),
        )
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with house() as h:
        r = request("r", prompt_of(100))
        h.router.expect("r")
        h.decode.admit(h.router.session, r, "m", False, 0.0, parent)
        admitted = await h.router.said["r"].get()
        await h.prefill.prefill(msgspec.structs.replace(h.call(r, admitted), traceparent=parent))
        await h.router.finished["r"].wait()
        assert await h.settles()
    spans = {s.name: s for s in exporter.get_finished_spans()}
    assert set(spans) == {"prefill", "transfer", "decode"}
    assert all(s.parent is not None and s.parent.span_id == 0xB7AD6B7169203331 for s in spans.values())
    transfer = spans["transfer"]
    assert 0 <= transfer.attributes["baton.kv.exposed_seconds"] * 1e9 <= transfer.end_time - transfer.start_time


async def test_a_lost_engine_ends_everything_with_worker_lost() -> None:
    async with house() as h:
        r, q = request("r", prompt_of(900), max_tokens=500), request("q", prompt_of(90), max_tokens=900)
        call = asyncio.ensure_future(h.prefill.prefill(h.call(r, await h.admit(r))))
        await h.admit(q, local=True)
        h.prefill.lost(WorkerLost("gone"))
        with pytest.raises(WorkerLost):
            await call
        h.decode.lost(WorkerLost("gone"))
        assert (await h.router.said["q"].get()).error.type == "WorkerLost"


async def test_a_drain_whose_grace_is_over_fails_prompts_with_draining() -> None:
    async with house() as h:
        r = request("r", prompt_of(1400))
        call = asyncio.ensure_future(h.prefill.prefill(h.call(r, await h.admit(r))))
        await asyncio.sleep(0)
        assert h.prefill.cancel_all("draining") == 1
        with pytest.raises(Draining):
            await call


async def test_fetch_gives_the_cached_blocks_and_unpins_them() -> None:
    async with house() as h:
        r = request("r", prompt_of(100))
        await h.answer(r)
        hashes = tuple(h.p.pool.findable())
        pages = [p async for p in h.p.source.fetch("m", (*hashes, b"x" * 32), h.p.spec.layout)]
        assert len(pages) == 6
        assert await h.settles()


@pytest.mark.parametrize(("address", "said", "fetched"), [("decode", 9, 9), ("decode", 99, 9), ("nowhere", 9, 0)])
async def test_a_prefill_worker_fetches_what_the_decode_worker_holds(address: str, said: int, fetched: int) -> None:
    async with house() as h:
        first = request("first", prompt_of(100), max_tokens=60)
        answer = await h.answer(first, local=True)  # only the decode worker has prompt and answer
        second = request("second", [*prompt_of(100), *answer, *prompt_of(30, 2)])
        admitted = await h.admit(second)
        call = msgspec.structs.replace(h.call(second, admitted), fetch_address=address, fetch_blocks=said)
        result = await h.prefill.prefill(call)
        assert (result.fetched_blocks, result.cached_tokens) == (fetched, 16 * fetched)
        await h.router.finished["second"].wait()
        assert h.router.tokens["second"] == oracle(second)
        assert await h.settles()


async def test_a_prefill_that_is_cancelled_while_it_fetches_leaves_nothing_behind() -> None:
    async with house() as h:
        await h.answer(request("first", prompt_of(400)), local=True)
        for turns in range(1, 40, 3):
            second = request(f"second{turns}", [*prompt_of(400), turns])
            admitted = await h.admit(second)
            call = msgspec.structs.replace(h.call(second, admitted), fetch_address="decode", fetch_blocks=25)
            prefill = asyncio.ensure_future(h.prefill.prefill(call))
            for _ in range(turns):
                await asyncio.sleep(0)
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)
            h.decode.cancel(h.router.session, second.request_id, "test")
            h.p.pool.check()
        assert await h.settles()
