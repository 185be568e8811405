"""Tests baton.launch.ray.seats without Ray: a small stand-in that keeps nodes, actors and placement groups."""

import sys
import types
from functools import partial
from typing import Any

import msgspec
import pytest

from baton.launch.ray.actors import RankActor
from baton.launch.ray.seats import RESERVED_S, Seats
from baton.launch.supervise import HostPlan, SlotStatus
from baton.protos.errors import ConfigError
from baton.tls.identity import TlsFiles

CERTIFICATE = TlsFiles("/crt", "/key", "/ca")


class RayError(Exception):
    """Stands for the root of Ray's own errors."""


class Actor:
    """Stands for a slot's actors, with ``ranks`` on further nodes; ``stop`` is answered when the test says so."""

    def __init__(self, plan: HostPlan, *ranks: "RanksActor") -> None:
        self.plan, self.ranks, self.state, self.killed = plan, ranks, "ready", False
        self.status = types.SimpleNamespace(remote=lambda: ("status", self))
        self.stop = types.SimpleNamespace(remote=self._stop)

    def _stop(self, grace_s: float) -> Any:
        return ("stop", self)


class RanksActor:
    """Stands for the actor on a further node of a slot."""

    def __init__(self, key_file: str, tls: str) -> None:
        self.key_file, self.tls, self.killed = key_file, tls, False


class FakeRay:
    """Has as much of Ray as Seats asks for; ``stopped`` holds slots whose hosts have ended."""

    def __init__(self) -> None:
        self.alive: dict[str, dict[str, float]] = {}
        self.named: dict[str, Any] = {}
        self.named_groups: dict[str, Any] = {}
        self.draining: dict[str, int] = {}
        self.actors: list[Actor] = []
        self.ranks: list[tuple[RanksActor, int]] = []  # and the bundles that they are in
        self.groups: list[str] = []
        self.stopped: set[str] = set()
        self.new_actors_are = "ready"
        self.unkillable: list[Any] = []
        self.removed: list[Any] = []
        self.full: set[str] = set()  # nodes on which somebody else has taken what was there
        self.exceptions = types.SimpleNamespace(RayError=RayError)
        client = types.SimpleNamespace(get_draining_nodes=lambda: self.draining)
        worker = types.SimpleNamespace(global_worker=types.SimpleNamespace(gcs_client=client))
        state = types.SimpleNamespace(
            available_resources_per_node=lambda: {n: r for n, r in self.alive.items() if n not in self.full}
        )
        self._private = types.SimpleNamespace(worker=worker, state=state)
        self.util = types.SimpleNamespace(
            list_named_actors=lambda: list(self.named), get_placement_group=self._group_named
        )

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": n, "Alive": True, "Resources": r, "Labels": {}} for n, r in self.alive.items()]

    def remote(self, **_: Any) -> Any:
        def start(kind: type, name: str, bundle: int, *arguments: Any) -> Any:
            made: Any
            if kind is RankActor:
                made = RanksActor(*arguments)
                self.ranks.append((made, bundle))
            else:
                made = Actor(msgspec.json.decode(arguments[0], type=HostPlan), *arguments[1:])
                self.actors.append(made)
                made.state = self.new_actors_are
            if name:
                self.named[name] = made
            return made

        def options(kind: type, scheduling_strategy: dict[str, Any], name: str = "", **_: Any) -> Any:
            bundle = scheduling_strategy["placement_group_bundle_index"]
            return types.SimpleNamespace(remote=lambda *arguments: start(kind, name, bundle, *arguments))

        return lambda kind: types.SimpleNamespace(options=partial(options, kind))

    def get_actor(self, name: str) -> Any:
        return self.named[name]

    def _group_named(self, name: str) -> Any:
        if name not in self.named_groups:
            raise ValueError(name)
        return self.named_groups[name]

    def place(self, bundles: list[dict[str, float]], name: str = "", **options: Any) -> Any:
        self.groups.append(str(options))
        nodes = [pin["ray.io/node-id"] for pin in options["bundle_label_selector"]]
        group = types.SimpleNamespace(bundle_specs=bundles, nodes=nodes)
        if name:
            self.named_groups[name] = group
        return group

    def table(self, group: Any) -> dict[str, str]:
        return {"state": "PENDING" if self.full & {*group.nodes} else "CREATED"}

    def wait(self, asked: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        done = [a for a in asked if a[0] == "status" or a[1].plan.slot in self.stopped]
        return done, [a for a in asked if a not in done]

    def get(self, answer: Any) -> bytes:
        return msgspec.json.encode(SlotStatus(answer[1].plan.slot, answer[1].state))

    def kill(self, actor: Actor | RanksActor) -> None:
        if actor in self.unkillable:
            raise RayError("its node does not answer")
        actor.killed = True
        self.named = {name: other for name, other in self.named.items() if other is not actor}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    groups = types.ModuleType("ray.util.placement_group")
    groups.placement_group = made.place  # type: ignore[attr-defined]
    groups.remove_placement_group = made.removed.append  # type: ignore[attr-defined]
    groups.placement_group_table = made.table  # type: ignore[attr-defined]
    strategies = types.ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda **options: options  # type: ignore[attr-defined]
    for name, module in (("placement_group", groups), ("scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, f"ray.util.{name}", module)
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


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
