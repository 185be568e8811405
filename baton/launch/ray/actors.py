"""Ray actors, one per slot, each in a placement group of its own on a node that the caller chose.

Knows nothing of which node is good. A lasting actor outlives the driver that started it: its name says which slot
it is, what runs there and on which node, so that the next driver finds it. Any other ends with its driver. A
placement group is a gang: all of a slot's bundles on its node, or nodes, or none. On each further node of a slot an
actor runs what ``baton ranks`` does for the slot's worker.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

import msgspec

from baton.launch.ray.node_choice import Seat, SlotRequest
from baton.launch.supervise import HostPlan, HostProcess, HostSupervisor, host_environment, start_host
from baton.process.processes import wait_exit
from baton.tls.identity import TlsFiles
from baton.worker.spec import dump_spec, load_spec

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorClass, ActorHandle
    from ray.util.placement_group import PlacementGroup

ANSWER_S = 2.0  # seconds that an actor has to answer
RAYLET_ENV = "RAY_RAYLET_PID"  # Ray says it to each of its workers
LOOK_S = 60.0  # waiting, in turns of
PREFIX, RANKS_PREFIX = "baton/", "baton-ranks/"
RANKS_S = 60.0  # seconds for the actors of a slot's further nodes to say where they listen
log = logging.getLogger("baton.placement")


class WorkerActor:
    """Supervises the worker host of one slot; ``plan`` is a HostPlan as JSON, ``ranks`` the handles of the slot's
    RankActors.

    Ray restarts the actor on its node without disturbing the host. The actor ends with its raylet, since nobody
    could then tell it to stop; the next actor of the slot adopts the host.
    """

    def __init__(self, plan: str, *ranks: ActorHandle) -> None:
        _end_with_raylet()
        self._ranks, self._plan = ranks, msgspec.json.decode(plan, type=HostPlan)
        self._supervisor = HostSupervisor(self._plan, self._start if ranks else start_host)
        self._supervisor.start()

    def _start(self, command: list[str], log: BinaryIO) -> HostProcess:
        """Starts the host with its ranks' present addresses: an actor that Ray restarted has another."""
        return start_host(told_of_ranks(self._plan, command, self._addresses()), log)

    def _addresses(self) -> list[str]:
        """Returns where the ranks of the other nodes are reached. Raises OSError, upon which it is tried again."""
        import ray

        try:
            found: list[str] = ray.get([actor.address.remote() for actor in self._ranks], timeout=RANKS_S)
        except ray.exceptions.RayError as error:
            raise OSError(f"no ranks on the other nodes of {self._plan.slot}: {error}") from None
        return found

    def status(self) -> str:
        """Returns the slot's SlotStatus as JSON."""
        return msgspec.json.encode(self._supervisor.status()).decode()

    def stop(self, grace_s: float) -> None:
        """Ends the slot's host for good: SIGTERM, then SIGKILL after ``grace_s`` seconds."""
        self._supervisor.stop(grace_s)


class RankActor:
    """Serves its node to a slot's worker on another one, as ``baton ranks`` does, with the key in ``key_file`` and
    the TlsFiles in the JSON ``tls``, of the same paths as the worker's.

    If it dies, the worker's ranks here do, and the worker; Ray restarts it, and the worker finds it by its address.
    """

    def __init__(self, key_file: str, tls: str = "null") -> None:
        from ray.util import get_node_ip_address

        from baton.engine.backends.ranks.hosts.agent import RankAgent

        _end_with_raylet()
        files = msgspec.json.decode(tls, type=TlsFiles | None)
        self._agent = RankAgent(f"{get_node_ip_address()}:0", key_file, host_environment(), files)
        # a thread that lives as long as this process: sessions end with the one that started them
        threading.Thread(target=self._agent.serve, args=(lambda: True,), name="ranks", daemon=True).start()

    def address(self) -> str:
        """Returns host:port at which the worker reaches it."""
        return self._agent.address


class ActorRecord(NamedTuple):
    """Describes an actor: its Ray handle, placement group (None if it has none), seat, the digest of its plan
    (``mark_of``), and the handles of the actors on its further nodes.
    """

    actor: ActorHandle
    group: PlacementGroup | None
    seat: Seat
    mark: str
    ranks: tuple[ActorHandle, ...] = ()


class Actors:
    """Starts, finds, stops and removes slots' actors; ``ray`` is the module, connected.

    ``lasting`` actors outlive this process, and a later one finds them.
    """

    def __init__(self, ray: ModuleType, lasting: bool = False) -> None:
        self._ray, self._lasting = ray, lasting

    def start(self, plan: HostPlan, seat: Seat) -> ActorRecord:
        """Asks Ray for the slot's actors on the nodes of ``seat``; returns the record at once, before they run."""
        from ray.util.placement_group import placement_group

        name, wish = actor_name(plan, seat), seat.wish
        nodes = [node_id for node_id in seat.node_ids for _ in range(wish.gang)]
        kept = {"name": name, "lifetime": "detached"} if self._lasting else {}
        pinned = [{"ray.io/node-id": node_id} for node_id in nodes]
        strategy = "SPREAD" if seat.further else "STRICT_PACK"  # where each goes the labels say
        bundles = [dict(wish.needs) for _ in nodes]
        group = placement_group(bundles, strategy=strategy, bundle_label_selector=pinned, **kept)
        ranks = tuple(self._rank(plan, seat, group, number) for number in range(1, len(seat.node_ids)))
        actor = self._actor(WorkerActor, wish, group, 0, name)
        handle = cast("ActorHandle", actor.remote(msgspec.json.encode(plan).decode(), *ranks))
        return ActorRecord(handle, group, seat, mark_of(plan), ranks)

    def _rank(self, plan: HostPlan, seat: Seat, group: PlacementGroup, number: int) -> ActorHandle:
        """Asks Ray for the actor on node ``number`` of a slot."""
        actor = self._actor(
            RankActor, seat.wish, group, number * seat.wish.gang, _rank_name(plan.slot, seat, number)
        )
        return cast("ActorHandle", actor.remote(plan.rank_key_file, msgspec.json.encode(plan.rank_tls).decode()))

    def _actor(
        self, kind: type, wish: SlotRequest, group: PlacementGroup, bundle: int, name: str
    ) -> ActorClass[object]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        custom = {each: amount for each, amount in wish.needs.items() if each != "GPU"}
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        kept = {"name": name, "lifetime": "detached"} if self._lasting else {}
        return self._ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4)(kind).options(
            resources=custom, num_gpus=wish.needs.get("GPU", 0), scheduling_strategy=strategy, **kept
        )

    def found(self) -> Iterator[ActorRecord]:
        """Yields the lasting actors that an earlier driver of the same Ray namespace left."""
        names = self._ray.util.list_named_actors() if self._lasting else ()
        for name in sorted(name for name in names if name.startswith(PREFIX)):
            try:
                actor = self._ray.get_actor(name)
            except ValueError:  # it went meanwhile
                continue
            yield self._known(name, actor)

    def has_place(self, placed: ActorRecord) -> bool:
        """Returns whether Ray has reserved what the slot needs, on all of its nodes."""
        from ray.util.placement_group import placement_group_table

        return placed.group is None or placement_group_table(placed.group).get("state") == "CREATED"

    def stop(self, placed: ActorRecord, grace_s: float) -> ObjectRef:
        """Asks an actor to end its host within ``grace_s`` seconds; returns a Ray reference that is done once the
        host has ended.
        """
        return placed.actor.stop.remote(grace_s)

    def remove(self, placed: ActorRecord) -> None:
        """Removes the actors and their placement group; a host that its actor has not ended keeps running."""
        from ray.util.placement_group import remove_placement_group

        actors = (placed.actor, *placed.ranks)
        steps: list[Callable[[], object]] = [partial(self._ray.kill, actor) for actor in actors]
        if placed.group is not None:
            steps.append(partial(remove_placement_group, placed.group))
        for step in steps:  # each, whatever becomes of those before it: what stays reserved nobody else gets
            try:
                step()
            except (self._ray.exceptions.RayError, ValueError) as error:
                log.warning("%s was not let go of in order: %s", placed.seat.wish.slot, error)

    def _known(self, name: str, actor: ActorHandle) -> ActorRecord:
        slot, role, mark, nodes = (*name.removeprefix(PREFIX).split("/"), "", "", "")[:4]
        node_id, *further = nodes.split(",")
        try:
            group = self._ray.util.get_placement_group(name)
        except ValueError:  # named otherwise, by another version: nobody knows what it takes, and it is not wanted
            return ActorRecord(actor, None, Seat(SlotRequest(slot, "", {}), node_id), "")
        bundles, hosts = group.bundle_specs, 1 + len(further)
        wish = SlotRequest(slot, role, dict(bundles[0]), len(bundles) // hosts, hosts=hosts)
        seat = Seat(wish, node_id, tuple(further))
        return ActorRecord(actor, group, seat, mark, tuple(self._ranks_of(slot, seat)))

    def _ranks_of(self, slot: str, seat: Seat) -> Iterator[ActorHandle]:
        """Yields the lasting actors on the further nodes of a slot."""
        for number in range(1, len(seat.node_ids)):
            with suppress(ValueError):  # it has gone
                yield self._ray.get_actor(_rank_name(slot, seat, number))


def told_of_ranks(plan: HostPlan, command: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """Returns the command of a slot's host with ``addresses`` as worker.rank_hosts: in the spec's file if the plan
    has a spec, else in the environment.
    """
    if not plan.spec:
        return ["env", f"BATON_WORKER__RANK_HOSTS={msgspec.json.encode(addresses).decode()}", *command]
    spec = load_spec(plan.spec)
    engine = msgspec.structs.replace(spec.engine, rank_hosts=tuple(addresses))
    file = Path(command[command.index("--spec") + 1])
    file.write_text(dump_spec(msgspec.structs.replace(spec, engine=engine)))
    return list(command)


def _end_with_raylet() -> None:
    """Starts a thread that ends this process with its raylet."""
    raylet = int(os.environ.get(RAYLET_ENV) or os.getppid())  # it may be gone, and another our parent
    threading.Thread(target=_end_with, args=(raylet,), name="raylet", daemon=True).start()


def _end_with(raylet: int) -> None:
    """Ends this process once the raylet has ended; the host, in a session of its own, goes on."""
    while not wait_exit(raylet, LOOK_S):
        pass
    os._exit(1)


def actor_name(plan: HostPlan, seat: Seat) -> str:
    """Returns the actor's name, of slot, role, plan digest and nodes: another plan or node gives another name."""
    return f"{PREFIX}{plan.slot}/{plan.role}/{mark_of(plan)}/{','.join(seat.node_ids)}"


def _rank_name(slot: str, seat: Seat, number: int) -> str:
    return f"{RANKS_PREFIX}{slot}/{number}/{','.join(seat.node_ids)}"


def mark_of(plan: HostPlan) -> str:
    """Returns a short digest of what a slot runs.

    The worker's spec is left out: a changed one counts from the host's next start on. So is what a worker on one
    node doesn't need: earlier versions didn't know it, and what they placed shall stay.
    """
    fields: dict[str, object] = msgspec.to_builtins(msgspec.structs.replace(plan, spec=""))
    unneeded = {"hosts", "rank_key_file"} if plan.hosts == 1 else set()
    unneeded |= {"rank_tls"} if plan.rank_tls is None else set()
    fields = {name: value for name, value in fields.items() if name not in unneeded}
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:12]
