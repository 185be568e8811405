"""Ray actors, one per slot, each in a placement group of its own on a node that the caller chose.

Knows nothing of which node is good. A lasting actor outlives the driver that started it: its name says which slot
it is, what runs there and on which node, so that the next driver finds it. Any other ends with its driver. A
placement group is a gang: all of a slot's bundles on one node, or none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from baton.launch.ray.node_choice import Seat, SlotRequest
from baton.launch.supervise import HostPlan, HostSupervisor
from baton.process.processes import wait_exit

ANSWER_S = 2.0
RAYLET_ENV = "RAY_RAYLET_PID"  # Ray says it to each of its workers
LOOK_S = 60.0  # waiting, in turns of
PREFIX = "baton/"
log = logging.getLogger("baton.placement")


class WorkerActor:
    """Supervises the worker host of one slot; ``plan`` is a HostPlan as JSON.

    Ray restarts the actor on its node without disturbing the host. The actor ends with its raylet, since nobody
    could then tell it to stop; the next actor of the slot adopts the host.
    """

    def __init__(self, plan: str) -> None:
        raylet = int(os.environ.get(RAYLET_ENV) or os.getppid())  # it may be gone, and another our parent
        threading.Thread(target=_end_with, args=(raylet,), name="raylet", daemon=True).start()
        self._supervisor = HostSupervisor(msgspec.json.decode(plan, type=HostPlan))
        self._supervisor.start()

    def status(self) -> str:
        """Returns the slot's SlotStatus as JSON."""
        return msgspec.json.encode(self._supervisor.status()).decode()

    def stop(self, grace_s: float) -> None:
        """Ends the slot's host for good: SIGTERM, then SIGKILL after ``grace_s`` seconds."""
        self._supervisor.stop(grace_s)


class ActorRecord(NamedTuple):
    """Describes an actor: its Ray handle, placement group (None if it has none), seat, and the digest of its plan
    (``mark_of``).
    """

    actor: Any
    group: Any
    seat: Seat
    mark: str


class Actors:
    """Starts, finds, stops and removes slots' actors; ``ray`` is the module, connected.

    ``lasting`` actors outlive this process, and a later one finds them.
    """

    def __init__(self, ray: Any, lasting: bool = False) -> None:
        self._ray, self._lasting = ray, lasting

    def start(self, plan: HostPlan, wish: SlotRequest, node_id: str) -> ActorRecord:
        """Asks Ray for the slot's actor on node ``node_id``; returns its record at once, before the actor runs."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        name, bundles = actor_name(plan, node_id), [dict(wish.needs) for _ in range(wish.gang)]
        kept = {"name": name, "lifetime": "detached"} if self._lasting else {}
        pinned = [{"ray.io/node-id": node_id} for _ in bundles]
        group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=pinned, **kept)
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        custom = {kind: amount for kind, amount in wish.needs.items() if kind != "GPU"}
        actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4)(WorkerActor).options(
            resources=custom, num_gpus=wish.needs.get("GPU", 0), scheduling_strategy=strategy, **kept
        )
        started = actor.remote(msgspec.json.encode(plan).decode())
        return ActorRecord(started, group, Seat(wish, node_id), mark_of(plan))

    def found(self) -> Iterator[ActorRecord]:
        """Yields the lasting actors that an earlier driver left."""
        names = self._ray.util.list_named_actors() if self._lasting else ()
        for name in sorted(name for name in names if name.startswith(PREFIX)):
            try:
                actor = self._ray.get_actor(name)
            except ValueError:  # it went meanwhile
                continue
            yield self._known(name, actor)

    def stop(self, placed: ActorRecord, grace_s: float) -> Any:
        """Asks an actor to end its host within ``grace_s`` seconds; returns a Ray reference that is done once the
        host has ended.
        """
        return placed.actor.stop.remote(grace_s)

    def remove(self, placed: ActorRecord) -> None:
        """Removes the actor and its placement group; a host that the actor has not ended keeps running."""
        from ray.util.placement_group import remove_placement_group

        try:
            self._ray.kill(placed.actor)
            if placed.group is not None:
                remove_placement_group(placed.group)
        except (self._ray.exceptions.RayError, ValueError) as error:
            log.warning("%s was not let go of in order: %s", placed.seat.wish.slot, error)

    def _known(self, name: str, actor: Any) -> ActorRecord:
        slot, role, mark, node_id = (*name.removeprefix(PREFIX).split("/"), "", "", "")[:4]
        try:
            group = self._ray.util.get_placement_group(name)
        except ValueError:  # named otherwise, by another version: nobody knows what it takes, and it is not wanted
            return ActorRecord(actor, None, Seat(SlotRequest(slot, "", {}), node_id), "")
        bundles = group.bundle_specs
        return ActorRecord(
            actor, group, Seat(SlotRequest(slot, role, dict(bundles[0]), len(bundles)), node_id), mark
        )


def _end_with(raylet: int) -> None:
    """Ends this process once the raylet has ended; the host, in a session of its own, goes on."""
    while not wait_exit(raylet, LOOK_S):
        pass
    os._exit(1)


def actor_name(plan: HostPlan, node_id: str) -> str:
    """Returns the actor's name, made of slot, role, plan digest and node; another plan or node gives another
    name.
    """
    return f"{PREFIX}{plan.slot}/{plan.role}/{mark_of(plan)}/{node_id}"


def mark_of(plan: HostPlan) -> str:
    """Returns a short digest of what a slot runs.

    The worker's spec is left out: a changed one counts from the host's next start on.
    """
    told = msgspec.json.encode(msgspec.structs.replace(plan, spec=""))
    return hashlib.sha256(told).hexdigest()[:12]
