"""A session's turns go to the decode worker that has the last one, unless that is gone, full or much dearer."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import Sampling
from baton.router.access.keys import ApiKey
from baton.router.dispatch.affinity import SessionHomes, rendezvous
from baton.router.policies import Candidate, ClusterSnapshot, RoutingRequest, load_policy, names
from baton.router.policies.adjustments.session_affinity import LEAST, SHARE, choose_with_session
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceSummary, RouterRequest
from tests.router.fake_services import answer_of, info
from tests.router.fake_workers import cluster, collect

PROMPT = tuple(range(40))
WORKERS = ("d0", "d1", "d2")


def request(session: str, tenant: str = "", model: str = "m") -> RouterRequest:
    key = ApiKey("k", tenant, "h") if tenant else None
    return RouterRequest("r", model, PROMPT, Sampling(), context=RequestContext(key=key, session=session))


def served_by(worker: str) -> ChoiceSummary:
    return ChoiceSummary(40, completion_tokens=3, decode_worker=worker)


def snapshot(*running: int, prefill: int = 1, **fields) -> ClusterSnapshot:
    return ClusterSnapshot(
        tuple(Candidate(info(f"p{i}", "prefill"), WorkerLoad()) for i in range(prefill)),
        tuple(
            Candidate(info(f"d{i}", "decode", max_batch=100), WorkerLoad(running=n)) for i, n in enumerate(running)
        ),
        **fields,
    )


def test_a_session_is_remembered_by_its_last_turn_and_a_name_is_its_tenants_own():
    sessions = SessionHomes()
    sessions.served(request("s"), served_by("d0"))
    sessions.served(request("s"), served_by("d2"))
    sessions.served(request("s", tenant="acme"), served_by("d1"))
    assert sessions.home(request("s"), WORKERS) == "d2"
    assert sessions.home(request("s", tenant="acme"), WORKERS) == "d1"
    assert sessions.home(request(""), WORKERS) == sessions.home(request("s"), ()) == ""
    sessions.served(request("s"), ChoiceSummary(40, decode_worker="d0"))  # it wrote nothing: no blocks are there
    assert sessions.home(request("s"), WORKERS) == "d2"
    assert sessions.home(request("s"), ("d0", "d1")) in ("d0", "d1")


def test_the_memory_is_bounded_and_forgets_the_longest_silent():
    sessions = SessionHomes(kept=3)
    for name in ("a", "b", "c", "a", "d"):
        sessions.served(request(name), served_by("gone" if name == "b" else "d0"))
    assert len(sessions) == 3
    assert sessions.home(request("b"), ("gone", *WORKERS)) == SessionHomes().home(request("b"), ("gone", *WORKERS))
    assert sessions.home(request("a"), WORKERS) == "d0"


def test_routers_that_never_saw_a_session_name_the_same_worker():
    first, second = SessionHomes(), SessionHomes()
    homes = [first.home(request(f"s{i}"), WORKERS) for i in range(300)]
    assert homes == [second.home(request(f"s{i}"), WORKERS) for i in range(300)]
    assert all(70 < homes.count(w) < 130 for w in WORKERS)


@given(st.binary(min_size=16, max_size=16), st.sampled_from(WORKERS))
def test_a_worker_that_goes_moves_its_own_sessions_alone(key: bytes, gone: str):
    left = [w for w in WORKERS if w != gone]
    before = rendezvous(key, WORKERS)
    assert rendezvous(key, left) == before or before == gone


@pytest.mark.parametrize("name", names())
def test_any_policy_keeps_a_session_on_its_worker_within_the_bound(name: str):
    policy = load_policy(name)
    for worker in WORKERS:
        for turn in range(4):
            found = choose_with_session(
                policy, snapshot(0, 1, 0, turn=turn), RoutingRequest(400, 64, session_worker=worker)
            )
            assert found is not None
            assert found.taken.decode == worker
            assert found.taken.terms["session"] < 0
            assert found.taken in found.options
            assert len({(o.prefill, o.decode) for o in found.options}) == len(found.options)


@pytest.mark.parametrize("name", ["cost", "least_loaded"])
def test_a_session_leaves_a_worker_that_costs_too_much_and_the_decision_says_so(name: str):
    policy, cluster_ = load_policy(name), snapshot(90, 0)
    found = choose_with_session(policy, cluster_, RoutingRequest(400, 64, session_worker="d0"))
    best = policy(cluster_, RoutingRequest(400, 64))
    assert found is not None
    assert best is not None
    assert found.taken == best.taken
    [stay] = [o for o in found.options if o.decode == "d0"]
    assert stay.terms["session"] == -max(LEAST, SHARE * best.taken.cost)
    assert stay.cost > found.taken.cost


@pytest.mark.parametrize("name", names())
def test_a_session_leaves_a_worker_that_is_full_gone_or_failed_it(name: str):
    policy, three = load_policy(name), snapshot(0, 0, 0)
    full = msgspec.structs.replace(
        three, decode=(msgspec.structs.replace(three.decode[0], full=True), *three.decode[1:])
    )
    for where, ask in (
        (full, RoutingRequest(400, 64, session_worker="d0")),
        (three, RoutingRequest(400, 64, session_worker="d9")),
        (three, RoutingRequest(400, 64, session_worker="d0", avoid=frozenset({"d0"}))),
    ):
        found = choose_with_session(policy, where, ask)
        assert found is not None
        assert found == policy(where, ask)
        assert found.taken.decode in ("d1", "d2") or where is three


async def test_turns_follow_each_other_and_a_dead_worker_is_left():
    async with cluster(1, 3, policy="round_robin") as c:

        async def turn(prompt: tuple[int, ...], session: str) -> str:
            [stream] = c.open(prompt, session=session)
            assert await collect(stream) == answer_of(prompt, 8)
            return stream.summary.decode_worker

        home = await turn(PROMPT, "s")
        assert {await turn(PROMPT + tuple(range(i)), "s") for i in range(6)} == {home}
        assert len({await turn(PROMPT, f"other {i}") for i in range(20)}) > 1
        assert len({await turn(PROMPT, "") for _ in range(6)}) == 3
        record = json.loads(await c.core.decisions.find("r"))
        assert "session" not in record["choices"][0]["placements"][0]["taken"]["terms"]
        dead = next(d for d in c.d if d.info.worker_id == home)
        await dead.die()
        new = await turn(PROMPT, "s")
        assert new != home
        assert {await turn(PROMPT, "s") for _ in range(3)} == {new}
        record = json.loads(await c.core.decisions.find("r"))
        assert record["session"] == "s"
        assert record["choices"][0]["placements"][0]["taken"]["terms"]["session"] < 0


async def test_a_turn_goes_where_the_last_one_was_decoded_and_not_back_where_the_sessions_name_leads():
    async with cluster(1, 3, policy="round_robin") as c:

        async def turn() -> str:
            [stream] = c.open(PROMPT, session="s")
            assert await collect(stream) == answer_of(PROMPT, 8)
            return stream.summary.decode_worker

        by_name = await turn()
        c.core.view.full(by_name, 60.0)
        now = await turn()
        assert now != by_name
        c.core.view.clear_full(by_name)
        assert {await turn() for _ in range(3)} == {now}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_clients_name_a_session_by_header_or_by_openais_field(router, fake, path: str) -> None:
    said = [{"role": "user", "content": "x"}]
    body = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(path, {"messages": said})
    headers = [{}, {"x-session-id": "a"}, {"session_id": "b"}, {"session-id": "c"}]
    for header in headers:
        await router.http.post(path, json=body, headers=header)
    await router.http.post(path, json=body | {"prompt_cache_key": "d"})
    await router.http.post(path, json=body | {"prompt_cache_key": "d"}, headers={"x-session-id": "e"})
    assert [r.context.session for r in fake.requests] == ["", "a", "b", "c", "d", "e"]
    long = await router.http.post(path, json=body, headers={"x-session-id": "s" * 257})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "x-session-id")
