"""Tests what is kept of a decision: every candidate and term, predicted against observed; bounded, and shared."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest

from baton.protos.nouns import Sampling
from baton.router.access.gate import AccessGate
from baton.router.access.keys import KeyRing, add_key
from baton.router.observe.decisions import DecisionLog, request_id_in
from baton.router.policies import Option, RoutingDecision
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceSummary, RouterRequest
from tests.router.fake_services import answer_of
from tests.router.fake_workers import cluster, collect, collect_beyond

PROMPT = tuple(range(40))


class Store:
    """Stands for Redis."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    async def put(self, records):
        self.held |= records

    async def get(self, key):
        return self.held.get(key)


def decided(log: DecisionLog, name: str, asked: str = "", over: bool = True, options: int = 2) -> None:
    request = RouterRequest(name, "m", (1, 2), Sampling(), context=RequestContext(asked_id=asked))
    record = log.opened(request, "short")
    trail = log.trail(record, 0, ChoiceSummary(prompt_tokens=2))
    ways = tuple(Option("prefill", f"d{i}", "p0", {"queue": 0.1 * i, "read": 0.2}) for i in range(options))
    trail.placed(RoutingDecision("cost", ways[0], ways, in_seconds=True), 0.5, 0.4)
    trail.over = over
    log.changed(record)


async def found(log: DecisionLog, name: str) -> dict:
    record = await log.find(name)
    assert record is not None
    return json.loads(record)


async def test_a_record_that_cannot_be_written_loses_none_beside_it():
    class Meter:
        def opened(self, record) -> None:
            pass

        def over(self, record) -> None:
            if record.request.request_id == "odd":
                raise ValueError("of no foreseen kind")

    store = Store()
    log = DecisionLog("r", lambda: 0.0, store, observer=Meter())
    for name in ("first", "odd", "last"):
        decided(log, name)
    await log.flush()
    assert set(store.held) == {"first", "last"}
    assert await log.find("odd") is None, "nor is it kept for ever as one that is under way"


async def test_a_served_request_tells_its_candidates_and_what_was_observed():
    async with cluster(2, 2, policy="cost", local_max=0) as c:
        [stream] = c.open(PROMPT, asked_id="mine")
        assert await collect(stream) == answer_of(PROMPT, 8)
        await c.idle()
        log = c.core.decisions
        for name in ("r", "mine", "cmpl-r", "chatcmpl-r"):
            record = await found(log, name)
            assert (record["request_id"], record["state"], record["context_class"]) == ("r", "over", "short")
        [choice] = record["choices"]
        [placement] = choice["placements"]
        pairs = {(o["prefill"], o["decode"]) for o in (placement["taken"], *placement["not_taken"])}
        assert pairs == {(p, d) for p in ("p0", "p1") for d in ("d0", "d1")}
        assert {"queue", "read", "ship", "write", "harm"} == placement["taken"]["terms"].keys()
        assert placement["taken"]["cost"] <= min(o["cost"] for o in placement["not_taken"])
        compared = choice["predicted_against_observed"]
        assert {"queue", "prefill", "transfer", "ttft"} == compared.keys()
        assert all(row["predicted_s"] >= 0 and row["observed_s"] >= 0 for row in compared.values())
        assert compared["prefill"]["observed_s"] == 0.2


async def test_a_moved_request_tells_why_it_left():
    async with cluster(1, 2) as c:
        c.d[0].stall_after(3)  # the first turn's
        [stream] = c.open(PROMPT)
        assert await collect_beyond(stream, c.d[0], 3) == answer_of(PROMPT, 8)
        await c.idle()
        [choice] = (await found(c.core.decisions, "r"))["choices"]
        assert choice["decode_worker"] == "d1"
        assert [p["taken"]["decode"] for p in choice["placements"]] == ["d0", "d1"]
        assert choice["placements"][0]["left_for"].startswith("d0: worker_lost")


async def test_running_requests_are_counted_past_the_queue():
    async with cluster() as c:
        c.d[0].hold_tokens.clear()
        [stream] = c.open(PROMPT, max_tokens=2)
        async for _ in stream:
            break
        registry, labels = c.metrics.registry, {"model": "m", "context_class": "short"}
        assert registry.get_sample_value("baton_requests_running", labels) == 1
        assert (await found(c.core.decisions, "r"))["state"] == "running"
        c.d[0].hold_tokens.set()
        await collect_rest(stream)
        await c.idle()
        assert registry.get_sample_value("baton_requests_running", labels) == 0


async def collect_rest(stream) -> None:
    async for _ in stream:
        pass


async def test_the_ring_is_bounded_in_entries_and_bytes():
    log = DecisionLog("r1", lambda: 0.0, kept=10)
    for i in range(50):
        decided(log, f"q{i}")
        await log.flush()
    assert len(log) == 10
    assert await log.find("q39") is None
    assert (await found(log, "q40"))["router"] == "r1"
    small = DecisionLog("r1", lambda: 0.0, kept_bytes=8000)
    for i in range(50):
        decided(small, f"q{i}", options=8)
        await small.flush()
    assert 0 < len(small) < 6


async def test_of_many_requests_at_once_each_is_explained_when_it_ends():
    store = Store()
    log = DecisionLog("r1", lambda: 0.0, store, kept=10)
    for i in range(50):
        decided(log, f"q{i}", over=False)
    for record in tuple(log._live.values()):
        record.trails[0].over = True
        log.changed(record)
    await log.flush()
    assert set(store.held) == {f"q{i}" for i in range(50)}
    assert len(log) == 10


async def test_without_a_flush_live_records_are_bounded_too():
    log = DecisionLog("r1", lambda: 0.0, kept=10, kept_live=10)
    for i in range(50):
        decided(log, f"q{i}", asked=f"a{i}", over=False)
    assert len(log) == 10
    assert len(log._aliases) <= 20


async def test_a_request_that_runs_is_found_by_its_callers_name_however_many_have_come_since():
    log = DecisionLog("r1", lambda: 0.0, kept=10)
    for i in range(50):
        decided(log, f"q{i}", asked=f"a{i}", over=i >= 20)
    await log.flush()
    for i in range(50, 100):
        decided(log, f"q{i}", asked=f"a{i}")
        await log.flush()
    assert (await found(log, "a0"))["state"] == "running"
    assert await log.find("a60") is None
    assert len(log._aliases) <= 20 + 10 + 1


async def test_any_router_answers_for_any_other():
    store = Store()
    first, second = (DecisionLog(name, lambda: 0.0, store) for name in ("r1", "r2"))
    decided(first, "q", asked="mine")
    assert await second.find("q") is None
    await first.flush()
    for name in ("q", "cmpl-q", "mine"):
        assert (await found(second, name))["router"] == "r1"
    assert await second.find("nobody") is None


async def test_the_name_under_which_another_ones_alias_is_kept_finds_nothing():
    store, clock = Store(), lambda: 0.0
    log = DecisionLog("one", clock, store)
    decided(log, "aa11", asked="mine")
    await log.flush()
    [alias] = [name for name in store.held if name != "aa11"]
    other = DecisionLog("two", clock, store)
    assert await other.find("mine") is not None
    for name in (alias, f"cmpl-{alias}", alias.removesuffix("-0")):
        assert await other.find(name) is None
        assert await log.find(name, "acme") is None


def test_ids_of_answers_name_their_request():
    named = ("cmpl-x", "chatcmpl-x", "resp_x", "msg_x", "rerank-x", "score-x", "batch_req_x", "x")
    assert [request_id_in(each) for each in named] == ["x"] * len(named)


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ],
)
async def test_each_surfaces_answers_name_their_request(router, fake, path, body):
    answer = (await router.http.post(path, json={"model": "tiny", **body})).json()
    assert request_id_in(answer["id"]) == fake.requests[-1].request_id != answer["id"]


async def test_the_endpoint_shows_a_record_to_its_tenant_alone(fake, model_dir, start_router, tmp_path):
    path = tmp_path / "keys.json"
    keys = {t: {"authorization": f"Bearer {add_key(path, t, 0.0, admin=t == 'boss')}"} for t in ("a", "b", "boss")}
    log = DecisionLog("r1", lambda: 0.0)
    ring = KeyRing(path, lambda: 0.0)
    async with start_router(fake, {"tiny": model_dir}, gate=AccessGate(ring), decisions=log) as c:
        key = ring.find(keys["a"]["authorization"].split()[1])
        log.opened(RouterRequest("q", "m", (1,), Sampling(), context=RequestContext(key=key)), "short")
        assert (await c.http.get("/v1/requests/q/explain")).status_code == 401
        seen = {t: (await c.http.get("/v1/requests/q/explain", headers=h)).status_code for t, h in keys.items()}
        assert seen == {"a": 200, "b": 404, "boss": 200}
        own = RequestContext(key=key, asked_id="svc/a?b#c%2f..")
        log.opened(RouterRequest("q2", "m", (1,), Sampling(), context=own), "short")
        path = f"/v1/requests/{quote(own.asked_id, safe='')}/explain"
        assert (await c.http.get(path, headers=keys["a"])).json()["request_id"] == "q2"
        unknown = await c.http.get("/v1/requests/nobody/explain", headers=keys["boss"])
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_unknown")
        assert "refused before it was queued" in unknown.json()["error"]["message"]


async def test_a_callers_own_id_shadows_nobody_elses_request():
    """x-request-id is any text: also somebody else's id."""
    store = Store()
    log, other = (DecisionLog(name, lambda: 0.0, store) for name in ("r1", "r2"))
    decided(log, "victim")
    decided(log, "mine", asked="victim")
    for _ in range(2):
        for one in (log, other):
            if await one.find("victim") is not None:
                assert (await found(one, "victim"))["request_id"] == "victim"
        await log.flush()
    assert await other.find("victim", "stranger") is not None
    decided(log, "again", asked="own")
    await log.flush()
    assert await other.find("own") is not None
    assert await other.find("own", "stranger") is None


async def test_a_call_with_several_prompts_is_found_by_its_own_id_too():
    store = Store()
    log, other = (DecisionLog(name, lambda: 0.0, store) for name in ("r1", "r2"))
    for at in range(2):
        decided(log, f"q-{at}")
    await log.flush()
    for one in (log, other):
        assert (await found(one, "cmpl-q"))["request_id"] == "q-0"
        assert (await found(one, "q-1"))["request_id"] == "q-1"
