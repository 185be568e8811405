"""Tests the view: links decide who is here, own counts come back to nothing, refusals are remembered a while."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from baton.protos.measurements import WorkerLoad
from baton.router.dispatch.revision import ClusterRevision
from baton.router.dispatch.view import REMEMBER_MODEL_S, TIGHT_S, ClusterView
from baton.router.policies import Option, RoutingDecision
from baton.router.workers.link_table import LinkTable
from tests.router.fake_services import FakeRoster, info
from tests.router.fake_workers import until


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def clock() -> Clock:
    return Clock()


@pytest.fixture
async def roster() -> FakeRoster:
    return FakeRoster()


@pytest.fixture
async def view(roster, clock):
    """A view over links that are put up by hand."""
    changes: list[int] = []
    revision = ClusterRevision(lambda: changes.append(1))
    links = LinkTable("router", revision.advance, random.Random(1))
    roster.join(info("p0", "prefill"), WorkerLoad(waiting_tokens=5))
    roster.join(info("d0", "decode"))
    made = ClusterView(roster, links, revision, clock)
    made.changes = changes
    made.refresh()
    for link in links:
        link._set(True)
    yield made
    await links.close()


def decision() -> RoutingDecision:
    return RoutingDecision("test", Option("prefill", "d0", "p0"))


async def test_a_snapshot_has_who_can_be_reached_with_their_load(view):
    snapshot = view.snapshot("m")
    assert [c.id for c in snapshot.prefill] == ["p0"]
    assert [c.id for c in snapshot.decode] == ["d0"]
    assert snapshot.prefill[0].waiting_tokens == 5
    assert view.snapshot("other").decode == ()
    assert view.snapshot("m", "adapter").decode == ()
    assert view.snapshot("m") is snapshot


async def test_a_workers_room_for_prompts_is_that_of_its_present_pages(view):
    (first,) = view.snapshot("m").decode
    room = view.prompt_room(first.info)
    assert room == first.info.pages * first.info.layout.block_tokens
    assert view.prompt_room(msgspec.structs.replace(first.info, pages=2 * first.info.pages)) == 2 * room
    assert view.prompt_room(first.info) == room


async def test_a_draining_or_unreachable_worker_gets_nothing_new(view, roster):
    for link in view._links:
        if link.info.role == "prefill":
            link._set(False)
    assert view.snapshot("m").prefill == ()
    draining = msgspec.structs.replace(roster.entries["d0"].info, state="draining")
    roster.join(draining)
    view.refresh()
    view.changed()
    assert view.snapshot("m").decode == ()
    assert not view.ready()


async def test_what_a_reservation_counts_it_gives_back_once(view):
    reservation = view.reserve(decision(), 40)
    assert view.local_counts() == {"p0": (0, 1, 40), "d0": (1, 0, 0)}
    reservation.mark_prefilled()
    reservation.mark_prefilled()
    assert view.local_counts() == {"d0": (1, 0, 0)}
    with reservation:
        pass
    reservation.close()
    assert view.local_counts() == {}


async def test_a_second_prefill_counts_no_second_seat(view):
    with view.reserve(decision(), 40), view.reserve(decision(), 40, seated=False):
        assert view.local_counts() == {"p0": (0, 2, 80), "d0": (1, 0, 0)}
    assert view.local_counts() == {}


async def test_a_full_worker_is_offered_again_after_a_while_or_when_something_ends_there(view, clock):
    running = view.reserve(decision(), 40)
    running.answered()
    view.full("d0", 0.25)
    assert view.snapshot("m").decode[0].full
    running.close()
    assert not view.snapshot("m").decode[0].full
    view.full("d0", 0.25)
    clock.now += 0.3
    view.changed()
    assert not view.snapshot("m").decode[0].full


async def test_a_worker_that_refused_lately_is_asked_one_at_a_time(view, clock):
    view.full("d0", 0.0)
    clock.now += 0.01
    view.changed()
    first = view.reserve(decision(), 40)
    assert view.snapshot("m").decode[0].full
    first.answered()
    assert not view.snapshot("m").decode[0].full
    clock.now += TIGHT_S
    second = view.reserve(decision(), 40)
    assert not view.snapshot("m").decode[0].full
    first.close()
    second.close()


async def test_every_change_tells_the_queue(view):
    told = view.changes
    told.clear()
    reservation = view.reserve(decision(), 40)
    reservation.mark_prefilled()
    reservation.close()
    next(iter(view._links))._set(False)
    assert len(told) >= 3
    told.clear()
    view.full("d0", 0.01)
    await until(lambda: told)


async def test_a_model_is_known_for_some_minutes_after_its_last_worker_went(view, roster, clock):
    assert [m.model_id for m in view.models()] == ["m"]
    for worker_id in ("p0", "d0"):
        roster.leave(worker_id)
    for link in view._links:
        link._set(False)
    view.refresh()
    assert view.models()
    clock.now += REMEMBER_MODEL_S + 1
    view.refresh()
    assert view.models() == ()


async def test_a_context_is_no_longer_than_the_largest_decode_pool_holds(view, roster):
    assert [m.max_model_len for m in view.models()] == [info("d0", "decode").max_model_len]
    for worker_id, role, pages in (("p0", "prefill", 4), ("d0", "decode", 20), ("d1", "decode", 30)):
        roster.join(info(worker_id, role, pages=pages, incarnation="new"))
    for link in view._links:
        link._set(False)
    view.refresh()
    assert [m.max_model_len for m in view.models()] == [30 * 16]


async def test_it_goes_on_looking_when_one_look_fails(view, roster, monkeypatch):
    look, failed = roster.snapshot, []

    def fails_once():
        if not failed:
            failed.append(True)
            raise KeyError("a mistake of ours")
        return look()

    monkeypatch.setattr(roster, "snapshot", fails_once)
    following = asyncio.create_task(view.run())
    roster.join(info("d1", "decode"))
    await until(lambda: {k.info.worker_id for k in view._links} == {"p0", "d0", "d1"}, 30)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_nothing_is_kept_of_a_worker_that_left_but_what_is_still_placed_there(view, roster):
    held = view.reserve(decision(), 10)
    view.full("p0", 0.01)
    roster.entries.clear()
    for link in list(view._links):
        link._set(False)
    view.refresh()
    assert view.local_counts().keys() == {"p0", "d0"}
    held.close()
    view.refresh()
    assert view._own == {}
