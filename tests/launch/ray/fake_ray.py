"""A small stand-in for Ray, which keeps nodes, actors and placement groups."""

import types
from functools import partial
from typing import Any

import msgspec

from baton.launch.ray.actors import RankActor
from baton.launch.supervise import HostPlan, SlotStatus


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
