"""Slots on the nodes of a Ray cluster: each has a placement group and an actor of its own, on a node chosen for it.

Given a connected Ray; knows nothing of how it was started or what a host serves. What a node's death or preemption
leaves without a seat is placed again elsewhere, after pauses that grow; a slot that is not wanted any more is
drained before its actor goes. A placement group is a gang: all of a slot's bundles on one node, or none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from baton.deploy.node_choice import Node, Seat, Wish, choose
from baton.deploy.supervise import BACKOFF_S, HostPlan, HostSupervisor, SlotStatus
from baton.protos.errors import ConfigError

ANSWER_S = 2.0
LOOK_S = 1.0  # between two looks at the nodes
SETTLED_S = 30.0  # in place for so long: the next loss is a first one again
URGENT_S = 10.0  # a node that goes sooner than this, and the drain, is left by all at once
KNOWN_S = 2.0  # after being ready for so long a worker is in use by every router
STOP_EXTRA_S = 3.0  # beyond a host's own grace, until its session is killed
log = logging.getLogger("baton.placement")


class WorkerActor:
    """Supervises the host of one slot. Ray restarts this actor on its node; the host doesn't notice."""

    def __init__(self, plan: str) -> None:
        self._supervisor = HostSupervisor(msgspec.json.decode(plan, type=HostPlan))
        self._supervisor.start()

    def status(self) -> str:
        """A SlotStatus, as JSON."""
        return msgspec.json.encode(self._supervisor.status()).decode()

    def stop(self, grace_s: float) -> None:
        """End the host and start it no more."""
        self._supervisor.stop(grace_s)


class _Seated:
    """A slot that has a node."""

    def __init__(self, seat: Seat, group: Any, actor: Any, since: float) -> None:
        self.seat, self.group, self.actor, self.since = seat, group, actor, since
        self.leaving: Any = None  # the answer to ``stop``, once it was asked
        self.leave_by = 0.0


class Seats:
    """Keeps ``want``-ed slots in place. Call ``tend`` again and again, from one thread."""

    def __init__(
        self,
        ray: Any,
        strategy: str = "peers",
        gpus: bool = False,
        drain_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._wall_clock = wall_clock
        self._ray, self._strategy, self._gpus, self._drain_s, self._clock = ray, strategy, gpus, drain_s, clock
        self._wanted: dict[str, HostPlan] = {}
        self._seats: dict[str, _Seated] = {}
        self._losses: dict[str, tuple[int, float]] = {}  # slot -> how often lost its node, not again before
        self._looked = float("-inf")
        self._last: dict[str, SlotStatus] = {}
        self._ready: dict[str, float] = {}  # slot -> since when

    def want(self, plans: Sequence[HostPlan]) -> None:
        """These slots from now on; ``tend`` does the rest."""
        self._wanted = {plan.slot: plan for plan in plans}
        self._looked = float("-inf")

    def unseated(self) -> list[HostPlan]:
        """Wanted slots without a node."""
        return [plan for slot, plan in self._wanted.items() if slot not in self._seats]

    def tend(self) -> None:
        """Look at the nodes, let go of what can't or shouldn't stay, place what is missing."""
        if self._clock() - self._looked < LOOK_S:
            self._finish_leaving()
            return
        self._looked = self._clock()
        nodes = self._nodes()
        draining = self._draining()
        for slot, seated in list(self._seats.items()):
            if seated.seat.node_id not in nodes:
                self._lose(slot, f"its node {seated.seat.node_id[:12]} is gone")
            elif seated.leaving is None and slot not in self._wanted:
                self._ask_to_leave(slot, "it is not wanted any more")
            elif seated.leaving is None and self._should_move(slot, draining.get(seated.seat.node_id)):
                self._ask_to_leave(slot, f"its node {seated.seat.node_id[:12]} will be taken away")
        self._finish_leaving()
        self._fill([node for name, node in nodes.items() if name not in draining])

    def statuses(self) -> tuple[dict[str, SlotStatus], bool]:
        """slot -> status, as it was where nobody answers; and whether anybody answered."""
        asked = {seated.actor.status.remote(): slot for slot, seated in self._seats.items()}
        done, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        answers = {asked[answer]: status for answer in done if (status := self._read(answer))}
        for slot in self._wanted:
            if slot not in self._seats:
                answers[slot] = SlotStatus(slot, "waiting")
            elif slot not in answers and slot not in self._last:
                self._last[slot] = SlotStatus(slot, "starting")
        self._last |= answers
        for slot, status in self._last.items():
            if status.state == "ready":
                self._ready.setdefault(slot, self._clock())
            else:
                self._ready.pop(slot, None)
        shown = dict(self._last)
        for slot in [slot for slot in self._last if slot not in self._wanted and slot not in self._seats]:
            shown[slot] = SlotStatus(slot, "ended")
            del self._last[slot]
        return shown, bool(done)

    def stop_all(self, grace_s: float) -> None:
        """End every host through its actor."""
        calls = [seated.actor.stop.remote(grace_s) for seated in self._seats.values()]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=grace_s + 1)

    def where(self) -> Mapping[str, str]:
        """slot -> node id."""
        return {slot: seated.seat.node_id for slot, seated in self._seats.items()}

    # ---- in --------------------------------------------------------------------------------------------

    def _fill(self, nodes: Sequence[Node]) -> None:
        now = self._clock()
        plans = [plan for plan in self.unseated() if self._losses.get(plan.slot, (0, 0.0))[1] <= now]
        if not plans:
            return
        wishes = [self._wish(plan, nodes) for plan in plans]
        chosen = choose(wishes, nodes, [seated.seat for seated in self._seats.values()], self._strategy)
        for plan, wish in zip(plans, wishes, strict=True):
            if plan.slot in chosen:
                self._seat(plan, wish, chosen[plan.slot])

    def _seat(self, plan: HostPlan, wish: Wish, node_id: str) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [dict(wish.needs) for _ in range(wish.gang)]
        pinned = [{"ray.io/node-id": node_id} for _ in bundles]
        group = placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=pinned)
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        custom = {name: amount for name, amount in wish.needs.items() if name != "GPU"}
        actor = self._ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4)(WorkerActor).options(
            resources=custom, num_gpus=wish.needs.get("GPU", 0), scheduling_strategy=strategy
        )
        started = actor.remote(msgspec.json.encode(plan).decode())
        self._seats[plan.slot] = _Seated(Seat(wish, node_id), group, started, self._clock())
        log.info("%s goes to node %s", plan.slot, node_id[:12])

    def _wish(self, plan: HostPlan, nodes: Sequence[Node]) -> Wish:
        needs: dict[str, float] = plan.resources or {resource_of(plan.role): 1}
        if self._gpus and "GPU" not in needs:
            # A worker takes a whole GPU, or an equal share where the cluster has fewer GPUs than workers.
            have = sum(node.resources.get("GPU", 0.0) for node in nodes)
            if not have:
                raise ConfigError("--device cuda: Ray sees no GPU here; use --device cpu", "worker.device")
            needs = {**needs, "GPU": min(1.0, int(100 * have / len(self._wanted)) / 100)}
        return Wish(plan.slot, plan.role, needs, max(1, plan.gang), plan.labels)

    # ---- out -------------------------------------------------------------------------------------------

    def _should_move(self, slot: str, deadline: float | None) -> bool:
        """Whether to leave a node that goes at ``deadline`` (0: nobody said; None: it stays). One of a role after
        the other, as long as there is time: another that is ready goes on serving meanwhile.
        """
        if deadline is None:
            return False
        role = self._seats[slot].seat.wish.role
        alike = {s: seated for s, seated in self._seats.items() if s != slot and seated.seat.wish.role == role}
        known = self._clock() - KNOWN_S
        ready = [s for s, seated in alike.items() if seated.leaving is None and self._ready.get(s, known) < known]
        urgent = deadline and deadline - self._wall_clock() < URGENT_S + self._drain_s + STOP_EXTRA_S
        return bool(ready or urgent or not alike)

    def _ask_to_leave(self, slot: str, why: str) -> None:
        log.info("%s leaves: %s", slot, why)
        seated, grace_s = self._seats[slot], self._drain_s + STOP_EXTRA_S
        seated.leaving = seated.actor.stop.remote(grace_s)
        seated.leave_by = self._clock() + grace_s + ANSWER_S

    def _finish_leaving(self) -> None:
        for slot, seated in list(self._seats.items()):
            if seated.leaving is None:
                continue
            done, _ = self._ray.wait([seated.leaving], timeout=0)
            if done or self._clock() > seated.leave_by:
                self._vacate(slot)
                self._looked = float("-inf")  # its place, or another, may be filled at once

    def _lose(self, slot: str, why: str) -> None:
        seated = self._seats[slot]
        self._vacate(slot)
        losses = 0 if self._clock() - seated.since > SETTLED_S else self._losses.get(slot, (0, 0.0))[0]
        pause = BACKOFF_S[min(losses, len(BACKOFF_S) - 1)] if losses else 0.0
        self._losses[slot] = (losses + 1, self._clock() + pause)
        log.warning("%s lost its place: %s", slot, why)

    def _vacate(self, slot: str) -> None:
        from ray.util.placement_group import remove_placement_group

        seated = self._seats.pop(slot)
        self._last[slot] = SlotStatus(slot, "waiting")
        self._ready.pop(slot, None)
        try:
            self._ray.kill(seated.actor)
            remove_placement_group(seated.group)
        except (self._ray.exceptions.RayError, ValueError) as error:
            log.warning("%s was not let go of in order: %s", slot, error)

    # ---- what Ray says ---------------------------------------------------------------------------------

    def _nodes(self) -> dict[str, Node]:
        return {
            found["NodeID"]: Node(found["NodeID"], dict(found["Resources"]), dict(found.get("Labels") or {}))
            for found in self._ray.nodes()
            if found["Alive"]
        }

    def _draining(self) -> dict[str, float]:
        """Nodes that were told to go (`ray drain-node`, a spot notice that the autoscaler passed on), and when:
        seconds since 1970, 0 when nobody said.
        """
        client = getattr(self._ray._private.worker.global_worker, "gcs_client", None)
        try:
            found = client.get_draining_nodes() if client is not None else {}
            return {_hex(node): deadline_ms / 1000 for node, deadline_ms in found.items()}
        except Exception:  # Ray's own inner interface: without it nodes drain by the signal to their hosts alone
            log.debug("Ray doesn't say which nodes drain", exc_info=True)
            return {}

    def _read(self, answer: Any) -> SlotStatus | None:
        try:
            return msgspec.json.decode(self._ray.get(answer), type=SlotStatus)
        except self._ray.exceptions.RayError:
            return None


def resource_of(role: str) -> str:
    """The custom resource that a node offers once per worker of ``role`` it can run."""
    return f"baton_{role}"


def _hex(node: Any) -> str:
    return str(node.hex() if hasattr(node, "hex") else node)
