"""A rolling change of checkpoint under one name: an answer ends on the weights that it began on, or says why not.

Workers of other weights answer otherwise, so that one token of the wrong ones changes the answer.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from baton.kv.layout.tables import MARK
from baton.protos.errors import LeaseUnknown, WeightsGone
from baton.protos.nouns import Sampling
from baton.router.request.request import RouterRequest
from baton.router.request.weights import WeightsPin, weights_of
from tests.router.fake_services import LAYOUT, answer_of, info
from tests.router.fake_workers import PATIENT, FakeIndex, cluster, collect, collect_beyond, until

PROMPT = tuple(range(40))
SHORT = (1, 2, 3)
OTHER = {"fingerprint": "g"}
LOSSY = {"layout": msgspec.structs.replace(LAYOUT, fidelity="bytes~int8")}
WAITS = msgspec.structs.replace(PATIENT, worker_wait_s=0.2)


@asynccontextmanager
async def rolling(other: dict = OTHER, prefill: int = 0, decode: int = 2, change=lambda c: None, **fields):
    """A cluster whose last decode worker differs by ``other``; ``change`` is done before any joins."""

    def differ(c) -> None:
        c.d[-1].info = msgspec.structs.replace(c.d[-1].info, **other)
        change(c)

    async with cluster(prefill, decode, settings=WAITS, prepare=differ, **fields) as c:
        yield c


@pytest.mark.parametrize("other", [OTHER, LOSSY], ids=["weights", "kv"])
async def test_a_half_written_answer_is_not_continued_on_other_weights(other):
    async with rolling(other) as c:
        c.d[0].stall_after(3)
        [stream] = c.open(SHORT)
        with pytest.raises(WeightsGone, match="bytes KV"):
            await asyncio.wait_for(collect_beyond(stream, c.d[0], 3), 60)
        assert stream.emitted == answer_of(SHORT, 3)
        assert c.d[1].admits == []
        record = msgspec.json.decode(await c.core.decisions.find("r"))
        assert record["choices"][0]["error"].startswith("weights_gone: ")
        assert record["choices"][0]["placements"][0]["weights"] == str(weights_of(c.d[0].info))
        c.d[0].leases.clear()
        await c.idle()


async def test_it_goes_on_where_only_the_pages_of_windows_are_divided_otherwise():
    divided = msgspec.structs.replace(LAYOUT, fidelity=LAYOUT.fidelity + MARK, windows=(0, 32))
    async with rolling({"layout": divided}) as c:
        c.d[0].stall_after(3)
        [stream] = c.open(SHORT)
        assert await collect_beyond(stream, c.d[0], 3) == answer_of(SHORT, 8)
        assert stream.summary.decode_worker == "d1"
        c.d[0].leases.clear()
        await c.idle()


async def test_it_goes_on_where_the_same_weights_are_however_many_others_there_are():
    async with rolling(decode=3) as c:
        c.d[0].stall_after(3)
        [stream] = c.open(SHORT)
        assert await collect_beyond(stream, c.d[0], 3) == answer_of(SHORT, 8)
        assert stream.summary.decode_worker == "d1"
        c.d[0].leases.clear()
        await c.idle()


async def test_an_answer_that_has_not_begun_starts_anew_on_whatever_weights_there_are():
    async with rolling() as c:
        c.d[0].hold_tokens.clear()
        [stream] = c.open(SHORT)
        await until(lambda: c.d[0].leases)
        await c.d[0].die()
        assert await asyncio.wait_for(collect(stream), 20) == answer_of(SHORT, 8)
        assert stream.summary.decode_worker == "d1"
        c.d[0].leases.clear()
        await c.idle()


async def test_a_swept_answer_of_several_choices_returns_to_its_weights_and_never_goes_to_others():
    async with rolling() as c:
        c.d[0].pace_s = 0.01
        streams = c.open(SHORT, n=3)
        await until(lambda: streams[0].emitted)
        c.d[0].end_with = [LeaseUnknown("swept")] * 3
        assert await asyncio.gather(*map(collect, streams)) == [answer_of(SHORT, 8, i) for i in range(3)]
        assert c.d[1].admits == []
        await c.idle()


async def test_two_choices_that_start_at_once_agree_on_their_weights():
    """The first choice is gone, so the others find no home to follow: turns are taken, and still they agree."""
    async with rolling(decode=2) as c:
        c.d[0].hold_tokens.clear()
        c.d[1].hold_tokens.clear()
        first, *others = c.open(SHORT, n=4)
        await until(lambda: c.d[0].leases or c.d[1].leases)
        first.cancel("stop_string")
        await until(lambda: sum(len(d.admits) for d in c.d) == 4)
        for d in c.d:
            d.hold_tokens.set()
        assert await asyncio.gather(*map(collect, others)) == [answer_of(SHORT, 8, i) for i in (1, 2, 3)]
        assert len({s.summary.decode_worker for s in others}) == 1
        await c.idle()


async def test_the_prompts_of_one_call_are_answered_on_the_same_weights():
    async with rolling() as c:
        pin = WeightsPin()
        streams = [c.open((i, 2), request_id=f"r-{i}", pin=pin)[0] for i in range(6)]
        await asyncio.gather(*map(collect, streams))
        assert len({s.summary.decode_worker for s in streams}) == 1
        alone = [c.open((i, 2), request_id=f"a-{i}")[0] for i in range(6)]
        await asyncio.gather(*map(collect, alone))
        assert {s.summary.decode_worker for s in alone} == {"d0", "d1"}


async def test_tokens_held_back_for_the_prompts_scores_are_forgotten_when_other_weights_begin_anew():
    def stall(c) -> None:
        c.d[0].stall_after(3)
        c.d[1].stall_after(0)

    async with rolling(change=stall) as c:
        [stream] = c.dispatcher.open(RouterRequest("r", "m", SHORT, Sampling(max_tokens=8, prompt_logprobs=0)))
        await until(lambda: any(run.progress._early for run in c.dispatcher._open.values()))
        await c.d[0].die()
        await until(lambda: c.d[1].granted)
        assert list(c.d[1].admits[0].token_ids) == list(SHORT), "nothing was given out: it is read anew"
        [run] = c.dispatcher._open.values()
        assert run.progress._early == []
        stream.cancel("client_gone")
        c.d[0].leases.clear()
        await c.idle()


async def test_no_prefill_is_hedged_to_weights_that_the_decode_worker_does_not_run():
    settings = msgspec.structs.replace(PATIENT, hedge_factor=1.0, hedge_least_s=0.05)

    def differ(c) -> None:
        c.p[1].info = msgspec.structs.replace(c.p[1].info, **OTHER)

    async with cluster(2, 1, settings=settings, prepare=differ) as c:
        c.p[0].hold.clear()
        [stream] = c.open(PROMPT)
        await until(lambda: c.p[0].requests)
        asyncio.get_running_loop().call_later(0.2, c.p[0].hold.set)
        assert await asyncio.wait_for(collect(stream), 30) == answer_of(PROMPT, 8)
        assert (len(c.p[0].requests), len(c.p[1].requests)) == (1, 0)
        await c.idle()


async def test_a_worker_that_was_replaced_by_other_weights_after_the_choice_gets_nothing_of_it():
    """Between the decision and its message the slot may have changed hands: both ends are looked at again."""
    async with cluster(1, 1, settings=WAITS) as c:
        real = c.view.reserve

        def replaced(decision, uncached, **how):
            for link in c.view._links:
                if link.info.role == "prefill":
                    link.info = msgspec.structs.replace(link.info, **OTHER)
            return real(decision, uncached, **how)

        c.view.reserve = replaced
        [stream] = c.open(PROMPT)
        assert await collect(stream) == answer_of(PROMPT, 8)
        assert stream.summary.way == "local"
        assert c.p[0].requests == []


async def test_hints_are_asked_of_the_weights_that_the_answer_needs():
    index = FakeIndex({"d0": 1, "d1": 1})
    async with rolling(index=index, decode=3) as c:
        c.d[0].stall_after(3)
        [stream] = c.open(PROMPT)
        await collect_beyond(stream, c.d[0], 3)
        assert index.asked[-1][0] == ["d1"]
        c.d[0].leases.clear()


async def test_limits_of_a_mixed_name_are_those_that_every_worker_can_keep():
    def smaller(c) -> None:
        c.d[-1].info = msgspec.structs.replace(c.d[-1].info, vocab_size=900, max_model_len=2048, eos_token_ids=(7,))

    async with rolling(change=smaller) as c:
        [model] = c.dispatcher.models()
        assert (model.vocab_size, model.max_model_len) == (900, 2048)
        assert model.eos_token_ids == (7,)


async def test_a_pin_is_free_again_when_nobody_holds_it_and_nothing_was_written():
    pin, one, two = WeightsPin(), weights_of(info("d0", "decode")), weights_of(info("d1", "decode", **OTHER))
    first, second = pin.hold(one), pin.hold(one)
    first.close()
    first.close()
    assert pin.weights == one
    second.close()
    assert pin.weights is None
    third = pin.hold(two)
    pin.fix()
    third.close()
    assert pin.weights == two
    assert pin.fixed
