"""Tests that who left and why is kept for a while, and that the one who knows best is believed."""

from __future__ import annotations

import time

import msgspec

from baton.cluster.departures import KEPT, KEPT_S, Departure, Departures, last_words, note_blocking
from baton.cluster.holds import HoldStore, RosterWithHolds
from baton.cluster.membership import Membership, PolledRoster, connect
from tests.router.fake_services import info


def gone(name: str = "d0", incarnation: str = "1", cause: str = "signal", at: float | None = None) -> Departure:
    return Departure(name, incarnation, "decode", cause, "SIGKILL", time.time() if at is None else at)


async def test_the_last_departures_are_kept_newest_first_and_bounded(redis) -> None:
    store, now = Departures(redis, "t"), time.time()
    for n in range(KEPT + 10):
        await store.note(gone(incarnation=str(n), at=now - 1000 + n))
    await store.note(gone("old", at=now - KEPT_S - 1))
    found = await store.recent()
    assert [d.incarnation for d in found] == [str(n) for n in range(KEPT + 9, 9, -1)]
    for key in await redis.keys("{t}:departed*"):
        assert 0 < await redis.ttl(key) <= KEPT_S


async def test_a_known_cause_counts_before_a_guess_and_the_first_known_one_stays(redis, server) -> None:
    store = Departures(redis, "t")
    await store.note(gone(cause="lease_lost"))
    await store.note(gone(cause="replaced"))
    assert [d.cause for d in await store.recent()] == ["lease_lost"]
    note_blocking(server.url, "t", gone(cause="oom"))
    await store.note(gone(cause="exit"))
    await store.note(gone(cause="lease_lost"))
    assert [d.cause for d in await store.recent()] == ["oom"]


async def test_a_redis_that_is_away_costs_the_record_alone(tmp_path) -> None:
    away = connect(f"unix://{tmp_path}/none")
    await Departures(away, "t").note(gone())
    assert await Departures(away, "t").recent() == ()
    note_blocking(f"unix://{tmp_path}/none", "t", gone())
    await away.aclose()


async def test_routers_note_who_went_without_a_word_and_not_who_said_goodbye(redis) -> None:
    now = 0.0
    store = Departures(redis, "t")
    roster = PolledRoster(redis, "t", forget_s=10.0, clock=lambda: now)
    held = RosterWithHolds(roster, HoldStore(redis, "t"), departures=store)
    for name in ("silent", "polite", "restarted", "turned"):
        await Membership(redis, "t", info(name, "decode")).beat()
    await held.refresh()
    polite = Membership(redis, "t", info("polite", "decode"))
    await polite.depart("drained", "told to stop")
    await polite.leave()
    await Membership(redis, "t", info("restarted", "decode", incarnation="r-2")).beat()
    turned = Membership(redis, "t", info("turned", "decode", state="draining"))
    await turned.beat()
    await held.refresh()
    turned.info = msgspec.structs.replace(turned.info, role="prefill", state="ready", incarnation="t-2")
    await turned.beat()
    await redis.delete("{t}:worker:silent")
    now = 11.0
    assert "polite, 0 s ago (told to stop)" in held.last_words("decode", "m")
    await held.refresh()
    said = held.last_words("decode", "m")
    assert said.startswith("the last one to leave was silent, 0 s ago (no heartbeat"), said
    assert held.last_words("prefill", "m") == held.last_words("decode", "another model") == ""
    found = {d.worker_id: (d.cause, d.incarnation) for d in await store.recent()}
    assert found == {
        "silent": ("lease_lost", "silent-1"),
        "polite": ("drained", "polite-1"),
        "restarted": ("replaced", "restarted-1"),
    }


def test_the_last_words_are_of_the_newest_that_left_for_good_and_could_have_served_the_model() -> None:
    left = [
        Departure("d0", "1", "decode", "oom", "killed for memory", 100.0),
        Departure("d1", "1", "decode", "engine", "its engine died", 130.0, "other"),
        Departure("d2", "1", "decode", "replaced", "incarnation 2 took its place", 140.0, "m"),
        Departure("d3", "1", "decode", "drained", "told to stop", 90.0, "m"),
        Departure("p0", "1", "prefill", "exit", "status 1", 150.0, "m"),
    ]
    assert last_words(left, "decode", "m", 161.0) == "the last one to leave was d0, 61 s ago (killed for memory)"
    assert last_words(left, "decode", "other", 131.0).startswith("the last one to leave was d1, 1 s ago")
    assert last_words(left, "prefill", "other", 131.0) == ""
