"""Tests baton.launch.ray.seats without Ray: a small stand-in that keeps nodes, actors and placement groups."""

import msgspec
import pytest

from baton.launch.ray.seats import RESERVED_S, Seats
from baton.launch.supervise import HostPlan, SlotStatus
from baton.protos.errors import ConfigError
from baton.tls.identity import TlsFiles
from tests.launch.ray.fake_ray import Actor, Clock, FakeRay

CERTIFICATE = TlsFiles("/crt", "/key", "/ca")


def seats(ray: FakeRay, clock: Clock, *slots: str, lasting: bool = False, gpus: bool = False) -> Seats:
    made = Seats(ray, gpus=gpus, clock=clock, wall_clock=clock, lasting=lasting)
    made.want([plan(slot) for slot in slots])
    made.tend()
    made.statuses()
    return made


def plan(slot: str, *command: str) -> HostPlan:
    return HostPlan(slot, slot.split("-")[0], "{}", "/slots", "/log", command)


def later(made: Seats, clock: Clock, seconds: float = 1.0) -> dict[str, SlotStatus]:
    clock.now += seconds
    made.tend()
    return made.statuses()[0]


def test_slots_of_a_dead_node_go_elsewhere_and_pauses_grow_with_each_loss(ray: FakeRay, clock: Clock) -> None:
    ray.alive = {"a": {"baton_decode": 1}}
    made = seats(ray, clock, "decode-0")
    for pause in (0.0, 0.5, 1.0, 2.0):
        (gone,) = made.where().values()
        spare = "a" if gone == "b" else "b"
        ray.alive = {spare: {"baton_decode": 1}}
        if pause:
            later(made, clock)
            assert made.unseated(), "not before the pause"
            later(made, clock, max(0.0, pause - 1.0) + 0.01)
        later(made, clock)
        assert made.where() == {"decode-0": spare}
    assert [actor.killed for actor in ray.actors] == [True] * 4 + [False]


def on_two_nodes(ray: FakeRay, clock: Clock) -> Seats:
    """A lasting worker of four ranks, two on each of two nodes."""
    shared = {"hosts": 2, "rank_key_file": "/key", "rank_tls": CERTIFICATE}
    wide = HostPlan("decode-0", "decode", "{}", "/slots", "/log", gang=2, **shared)
    made = Seats(ray, clock=clock, wall_clock=clock, lasting=True)
    made.want([wide])
    made.tend()
    made.statuses()
    return made


def test_a_gang_whose_place_others_took_meanwhile_goes_elsewhere_and_gives_it_back(
    ray: FakeRay, clock: Clock
) -> None:
    """Ray reserves all of it or nothing, and waits for ever on the nodes that were chosen."""
    ray.alive, ray.full = {name: {"baton_decode": 1} for name in ("a", "b", "c")}, {"b"}
    wide = msgspec.structs.replace(plan("decode-0"), hosts=2, rank_key_file="/key", rank_tls=CERTIFICATE)
    made = Seats(ray, clock=clock, wall_clock=clock)  # type: ignore[arg-type]
    made.want([wide])
    made.tend()
    taken = ray.actors[0]
    while not taken.killed:
        assert "'b'" in ray.groups[-1]
        later(made, clock)
        assert clock.now < 1000 + 2 * RESERVED_S
    assert len(ray.removed) == 1, "what would be reserved for it is given back"
    assert all(ranks.killed for ranks, _ in ray.ranks[:1])
    assert "'b'" not in ray.groups[-1]
    before = len(ray.groups)
    for _ in range(int(2 * RESERVED_S)):
        later(made, clock)
    assert (len(ray.groups), ray.actors[-1].killed) == (before, False), "where it has its place it stays"


def test_a_worker_on_two_nodes_waits_for_both_and_has_an_actor_on_each(ray: FakeRay, clock: Clock) -> None:
    ray.alive = {"a": {"baton_decode": 2}, "b": {"baton_decode": 1}}
    made = on_two_nodes(ray, clock)
    assert made.where() == {}
    assert ray.groups == [], "no half is held"
    ray.alive["b"] = {"baton_decode": 2}
    later(made, clock)
    pins = [f"{{'ray.io/node-id': '{name}'}}" for name in "aabb"]
    assert f"[{', '.join(pins)}]" in ray.groups[0], "two bundles on each"
    (ranks, bundle), (actor,) = ray.ranks[0], ray.actors
    assert (ranks.key_file, bundle, actor.ranks) == ("/key", 2, (ranks,))
    assert msgspec.json.decode(ranks.tls, type=TlsFiles) == CERTIFICATE


@pytest.mark.parametrize("dead", ["a", "b"])
def test_a_worker_on_two_nodes_loses_its_place_with_either_also_one_taken_over(
    ray: FakeRay, clock: Clock, dead: str
) -> None:
    ray.alive = {"a": {"baton_decode": 2}, "b": {"baton_decode": 2}}
    on_two_nodes(ray, clock)
    made = on_two_nodes(ray, clock)
    assert len(ray.actors) == 1, "it is taken over"
    ray.alive = {**ray.alive, "c": {"baton_decode": 2}}
    del ray.alive[dead]
    later(made, clock)
    assert [actor.killed for actor in ray.actors] == [True, False]
    assert [ranks.killed for ranks, _ in ray.ranks] == [True, False]
    later(made, clock)
    assert made.where()["decode-0"] != dead


def test_an_actor_that_cannot_be_ended_keeps_neither_its_ranks_nor_their_nodes(ray: FakeRay, clock: Clock) -> None:
    ray.alive = {"a": {"baton_decode": 2}, "b": {"baton_decode": 2}}
    made = on_two_nodes(ray, clock)
    ray.unkillable = list(ray.actors)
    del ray.alive["a"]
    later(made, clock)
    assert [ranks.killed for ranks, _ in ray.ranks] == [True]
    assert len(ray.removed) == 1


def test_who_finds_no_room_waits_and_is_seated_when_a_node_joins(ray: FakeRay, clock: Clock) -> None:
    made = seats(ray, clock, "prefill-0")
    assert made.statuses()[0]["prefill-0"].state == "waiting"
    ray.alive["n"] = {"baton_prefill": 1}
    later(made, clock)
    assert made.where() == {"prefill-0": "n"}
    assert "'ray.io/node-id': 'n'" in ray.groups[0]


def test_a_slot_that_is_not_wanted_drains_before_its_actor_goes_and_comes_back_when_it_is(
    ray: FakeRay, clock: Clock
) -> None:
    ray.alive["n"] = {"baton_decode": 2}
    made = seats(ray, clock, "decode-0", "decode-1")
    made.want([plan("decode-0")])
    later(made, clock)
    assert not ray.actors[1].killed, "it drains"
    made.want([plan("decode-0"), plan("decode-1")])
    later(made, clock, 0.1)
    assert len(ray.actors) == 2, "not twice at once"
    ray.stopped.add("decode-1")
    later(made, clock, 0.1)
    assert ray.actors[1].killed
    later(made, clock)
    assert set(made.where()) == {"decode-0", "decode-1"}
    assert len(ray.actors) == 3


def test_a_host_that_does_not_stop_is_given_up_after_its_time(ray: FakeRay, clock: Clock) -> None:
    ray.alive["n"] = {"baton_decode": 2}
    made = seats(ray, clock, "decode-0", "decode-1")
    made.want([plan("decode-0")])
    later(made, clock)
    assert later(made, clock, 30)["decode-1"].state == "ended"
    assert ray.actors[1].killed


def test_a_node_that_will_be_taken_is_left_one_worker_of_a_role_after_the_other(ray: FakeRay, clock: Clock) -> None:
    ray.alive = {"old": {"baton_decode": 2}}
    made = seats(ray, clock, "decode-0", "decode-1")
    ray.alive["new"] = {"baton_decode": 2}
    ray.draining = {"old": int((clock.now + 300) * 1000)}
    clock.now += 5
    ray.new_actors_are = "starting"
    ray.stopped = {"decode-0"}
    for _ in range(9):
        later(made, clock)
    assert made.where() == {"decode-0": "new", "decode-1": "old"}, "until the first serves again"
    ray.actors[-1].state = "ready"
    ray.stopped = {"decode-1"}
    later(made, clock)
    assert made.where()["decode-1"] == "old", "and every router knows"
    for _ in range(5):
        later(made, clock)
    assert set(made.where().values()) == {"new"}


def test_a_node_that_goes_very_soon_is_left_by_all_at_once(ray: FakeRay, clock: Clock) -> None:
    ray.alive = {"old": {"baton_decode": 2}, "new": {"baton_decode": 0}}
    made = seats(ray, clock, "decode-0", "decode-1")
    ray.stopped = {"decode-0", "decode-1"}
    ray.draining = {"old": int((clock.now + 5) * 1000)}
    later(made, clock)
    later(made, clock)
    assert made.where() == {}
    assert {plan.slot for plan in made.unseated()} == {"decode-0", "decode-1"}


def test_one_of_two_leaves_a_node_at_a_time_however_often_it_is_looked_at(ray: FakeRay, clock: Clock) -> None:
    ray.alive = {"old": {"baton_decode": 2}}
    made = seats(ray, clock, "decode-0", "decode-1")
    ray.alive["new"] = {"baton_decode": 2}
    ray.draining = {"old": int((clock.now + 300) * 1000)}
    ray.new_actors_are = "starting"
    ray.stopped = {"decode-0", "decode-1"}
    for _ in range(50):
        later(made, clock, 0.2)
    assert sorted(made.where().values()) == ["new", "old"]


def test_the_next_one_takes_over_lasting_workers_and_drains_what_it_does_not_want(
    ray: FakeRay, clock: Clock
) -> None:
    ray.alive["n"] = {"baton_decode": 2, "baton_prefill": 1}
    seats(ray, clock, "decode-0", "decode-1", lasting=True)
    made = seats(ray, clock, "decode-0", "prefill-0", lasting=True)
    assert len(ray.actors) == 3, "decode-0 is not started again"
    assert made.where() == {"decode-0": "n", "decode-1": "n", "prefill-0": "n"}
    ray.stopped = {"decode-1"}
    assert later(made, clock)["decode-1"].state == "ended"
    assert [actor.killed for actor in ray.actors] == [False, True, False]
    assert set(made.where()) == {"decode-0", "prefill-0"}


def test_a_lasting_worker_that_an_earlier_placer_told_to_end_is_placed_anew(ray: FakeRay, clock: Clock) -> None:
    ray.alive["n"] = {"baton_decode": 2}
    seats(ray, clock, "decode-0", "decode-1", lasting=True)
    made = seats(ray, clock, "decode-0", "decode-1", lasting=True)
    ray.actors[1].state = "ended"
    for _ in range(3):
        later(made, clock)
    assert [actor.killed for actor in ray.actors] == [False, True, False]
    assert set(made.where()) == {"decode-0", "decode-1"}
    later(made, clock)
    assert len(ray.actors) == 3, "once"


def test_what_another_version_named_otherwise_is_drained_and_placed_anew(ray: FakeRay, clock: Clock) -> None:
    ray.alive["n"] = {"baton_decode": 1}
    ray.named["baton/decode-0/0123456789ab"] = old = Actor(plan("decode-0"))
    ray.named["somebody/else"] = Actor(plan("decode-0"))
    made = seats(ray, clock, "decode-0", lasting=True)
    ray.stopped = {"decode-0"}
    for _ in range(3):
        later(made, clock)
    assert old.killed
    assert "somebody/else" in ray.named
    assert made.where() == {"decode-0": "n"}


def test_workers_of_another_plan_are_replaced_one_of_a_role_after_the_other(ray: FakeRay, clock: Clock) -> None:
    ray.alive["n"] = {"baton_decode": 2}
    made = seats(ray, clock, "decode-0", "decode-1", lasting=True)
    clock.now += 5
    ray.new_actors_are = "starting"
    ray.stopped = {"decode-0", "decode-1"}
    made.want([plan("decode-0", "new"), plan("decode-1", "new")])
    for _ in range(30):
        later(made, clock, 0.3)
    assert [actor.killed for actor in ray.actors] == [True, False, False], "until the first serves"
    ray.actors[-1].state = "ready"
    for _ in range(30):
        later(made, clock, 0.3)
    assert [actor.plan.command for actor in ray.actors if not actor.killed] == [("new",), ("new",)]


@pytest.mark.parametrize(("gpus", "wished"), [(4, [2.0, 2.0]), (3, [2.0]), (1, [])])
def test_a_worker_of_ranks_on_cards_has_a_gpu_for_each_or_waits(
    ray: FakeRay, clock: Clock, gpus: int, wished: list[float]
) -> None:
    ray.alive["n"] = {"baton_decode": 2, "GPU": gpus}
    made = Seats(ray, gpus=True, clock=clock, wall_clock=clock)
    made.want([msgspec.structs.replace(plan(f"decode-{number}"), cards=2) for number in range(2)])
    made.tend()
    made.statuses()
    assert [seated.placed.seat.wish.needs["GPU"] for seated in made._seats.values()] == wished


def test_workers_of_one_rank_share_the_gpus_that_ranks_leave(ray: FakeRay, clock: Clock) -> None:
    ray.alive["n"] = {"baton_decode": 3, "GPU": 3}
    made = Seats(ray, gpus=True, clock=clock, wall_clock=clock)
    wanted = [msgspec.structs.replace(plan(f"decode-{at}"), cards=cards) for at, cards in enumerate((2, 1, 1))]
    made.want(wanted)
    made.tend()
    found = {slot: seated.seat.wish.needs["GPU"] for slot, seated in made._seats.items()}
    assert found == {"decode-0": 2.0, "decode-1": 0.5, "decode-2": 0.5}
    ray.alive["n"]["GPU"] = 2
    other = Seats(ray, gpus=True, clock=clock, wall_clock=clock)
    other.want(wanted)
    other.tend()
    assert set(other.where()) == {"decode-0"}, "the others wait for a GPU that no rank has"


def test_a_lasting_worker_waits_for_a_whole_gpu_and_another_takes_a_share(ray: FakeRay, clock: Clock) -> None:
    ray.alive["n"] = {"baton_decode": 2, "GPU": 1}
    assert set(seats(ray, clock, "decode-0", "decode-1", gpus=True).where()) == {"decode-0", "decode-1"}
    assert set(seats(ray, clock, "decode-0", "decode-1", gpus=True, lasting=True).where()) == {"decode-0"}


def test_workers_whose_only_gpus_have_gone_wait_for_others_once_they_were_placed(
    ray: FakeRay, clock: Clock
) -> None:
    """An error would end the process that keeps all the others in place, again and again."""
    made = Seats(ray, gpus=True, clock=clock, wall_clock=clock)
    made.want([plan("decode-0")])
    with pytest.raises(ConfigError, match="no GPU"):
        made.tend()
    made.patient = True
    later(made, clock)
    assert made.where() == {}
    ray.alive["n"] = {"baton_decode": 1, "GPU": 1}
    later(made, clock)
    assert set(made.where()) == {"decode-0"}
