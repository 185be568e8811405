"""Slots on the nodes of a Ray cluster: which are wanted, where each sits, which has to leave and which comes next.

Given a connected Ray; knows nothing of how it was started, of what a host serves, or of how an actor is asked for
(``actors``). Slots that lose their node by its death or preemption are placed elsewhere, after pauses that grow. A
slot that is not wanted any more, or that shall run something else, is drained before its actor goes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

from baton.launch.ray.actors import ANSWER_S, ActorRecord, Actors, mark_of
from baton.launch.ray.node_choice import RayNode, Seat, SlotRequest, choose_seats
from baton.launch.supervise import BACKOFF_S, HostPlan, SlotStatus
from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from ray import ObjectRef

RESERVED_S = 10.0  # for Ray to reserve a place that was chosen: it takes milliseconds where there is room
FULL_S = 60.0  # so long nobody is placed on a node on which Ray found no room, whatever the node offers
LOOK_S = 1.0  # between two looks at the nodes
SETTLED_S = 30.0  # in place for so long: the next loss is a first one again
URGENT_S = 10.0  # a node that goes sooner than this, and the drain, is left by all at once
KNOWN_S = 2.0  # after being ready for so long a worker is in use by every router
STOP_EXTRA_S = 3.0  # beyond a host's own grace, until its session is killed
log = logging.getLogger("baton.placement")


class _SeatedSlot:
    """A slot that has a node."""

    def __init__(self, placed: ActorRecord, since: float) -> None:
        self.placed, self.seat, self.since = placed, placed.seat, since
        self.leaving: ObjectRef | None = None  # the answer to ``stop``, once it was asked
        self.leave_by = 0.0
        self.is_reserved = False


class Seats:
    """Keeps the slots given to ``want`` in place. Call ``tend`` again and again, from one thread.

    ``lasting``: workers outlive this process, and those that an earlier one left are taken over; each takes a whole
    GPU, and waits for one.
    """

    def __init__(
        self,
        ray: ModuleType,
        strategy: str = "peers",
        gpus: bool = False,
        drain_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        lasting: bool = False,
    ) -> None:
        self._wall_clock, self._lasting = wall_clock, lasting
        self._ray, self._strategy, self._gpus, self._drain_s, self._clock = ray, strategy, gpus, drain_s, clock
        self._actors = Actors(ray, lasting)
        self.patient = False  # a role without any GPU is no error: its node is gone, and waited for
        self._has_adopted = not lasting
        self._wanted: dict[str, HostPlan] = {}
        self._seats: dict[str, _SeatedSlot] = {}
        self._losses: dict[str, tuple[int, float]] = {}  # slot -> how often lost its node, not again before
        self._full: dict[str, float] = {}  # node -> until when nobody is placed there
        self._looked = float("-inf")
        self._last: dict[str, SlotStatus] = {}
        self._ready: dict[str, float] = {}  # slot -> since when

    def want(self, plans: Sequence[HostPlan]) -> None:
        """Sets the slots to keep from now on; ``tend`` places and drains accordingly."""
        self._wanted = {plan.slot: plan for plan in plans}
        self._looked = float("-inf")

    def unseated(self) -> list[HostPlan]:
        """Returns the plans of wanted slots that have no node."""
        return [plan for slot, plan in self._wanted.items() if slot not in self._seats]

    def tend(self) -> None:
        """Looks at the nodes, removes slots that can't or shouldn't stay, and places missing ones."""
        if self._clock() - self._looked < LOOK_S:
            self._finish_leaving()
            return
        self._looked = self._clock()
        self._adopt()
        nodes, draining = self._nodes(), self._draining()
        for slot, seated in list(self._seats.items()):
            gone = [node_id for node_id in seated.seat.node_ids if node_id not in nodes]
            if seated.leaving is None and gone:
                self._lose(slot, f"its node {gone[0][:12]} is gone")
            elif seated.leaving is None and self._is_refused(seated):
                full = self._without_room(seated.seat)
                self._full |= dict.fromkeys(full, self._clock() + FULL_S)
                self._lose(slot, f"others took its room on node {full[0][:12]} meanwhile")
            elif seated.leaving is None and self._has_ended(slot):
                self._lose(slot, "it was told to end, by an earlier placer or its node")
        self._finish_leaving()
        self._full = {name: until for name, until in self._full.items() if until > self._clock()}
        self._fill([node for name, node in nodes.items() if name not in draining and name not in self._full])
        for slot, seated in list(self._seats.items()):  # last: who could be seated again keeps its role served
            if seated.leaving is None and (why := self._why_leave(slot, seated, draining)):
                self._ask_to_leave(slot, why)

    def statuses(self) -> tuple[dict[str, SlotStatus], bool]:
        """Returns slot -> status, and whether any actor answered; a slot without an answer keeps its last
        status.
        """
        asked = {seated.placed.actor.status.remote(): slot for slot, seated in self._seats.items()}
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
        """Ends every worker host through its actor; blocks for ``grace_s`` + 1 seconds at most."""
        calls = [self._actors.stop(seated.placed, grace_s) for seated in self._seats.values()]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=grace_s + 1)

    def where(self) -> Mapping[str, str]:
        """Returns slot -> id of its node, for every slot that has one."""
        return {slot: seated.seat.node_id for slot, seated in self._seats.items()}

    # ---- in --------------------------------------------------------------------------------------------

    def _fill(self, nodes: Sequence[RayNode]) -> None:
        now = self._clock()
        plans = [plan for plan in self.unseated() if self._losses.get(plan.slot, (0, 0.0))[1] <= now]
        if not plans:
            return
        wishes = [self._wish(plan, nodes) for plan in plans]
        chosen = choose_seats(wishes, nodes, [seated.seat for seated in self._seats.values()], self._strategy)
        for plan in plans:
            if plan.slot in chosen:
                placed = self._actors.start(plan, chosen[plan.slot])
                self._seats[plan.slot] = _SeatedSlot(placed, self._clock())
                log.info("%s goes to node %s", plan.slot, _named(placed.seat))

    def _adopt(self) -> None:
        """Once: take over what an earlier one of us left. Of two of one slot the second goes."""
        if self._has_adopted:
            return
        self._has_adopted = True
        for placed in self._actors.found():
            slot = placed.seat.wish.slot
            if slot in self._seats:
                self._ray.wait([self._actors.stop(placed, ANSWER_S)], timeout=2 * ANSWER_S)
                self._actors.remove(placed)
            else:
                self._seats[slot] = _SeatedSlot(placed, self._clock())
                log.info("%s is on node %s already", slot, _named(placed.seat) or "(not said)")

    def _wish(self, plan: HostPlan, nodes: Sequence[RayNode]) -> SlotRequest:
        needs: dict[str, float] = plan.resources or {resource_of(plan.role): 1}
        if self._gpus and "GPU" not in needs:
            ranks = plan.cards > 1 or self._lasting
            needs = {**needs, "GPU": float(plan.cards) if ranks else self._gpu_share(nodes)}
        return SlotRequest(plan.slot, plan.role, needs, max(1, plan.gang), plan.labels, plan.hosts)

    def _gpu_share(self, nodes: Sequence[RayNode]) -> float:
        """Returns a worker's share of a GPU: a whole one, or an equal share where there are fewer than workers.

        Ranks have whole ones, which leave the others less; who finds none waits. Raises ConfigError if there is no
        GPU at all, unless ``patient``.
        """
        have = sum(node.resources.get("GPU", 0.0) for node in nodes)
        if not have and self.patient:
            return 1.0
        if not have:
            raise ConfigError("--device cuda: Ray sees no GPU here; use --device cpu", "worker.device")
        cards = [plan.cards for plan in self._wanted.values()]
        left = have - sum(count for count in cards if count > 1)
        return min(1.0, int(100 * left / cards.count(1)) / 100) if left > 0 else 1.0

    # ---- out -------------------------------------------------------------------------------------------

    def _why_leave(self, slot: str, seated: _SeatedSlot, draining: Mapping[str, float]) -> str:
        """Returns why a slot's worker must leave its node; empty if it stays."""
        plan = self._wanted.get(slot)
        if plan is None:
            return "it is not wanted any more"
        going = [node_id for node_id in seated.seat.node_ids if node_id in draining]
        soonest = min((draining[node_id] for node_id in going if draining[node_id]), default=0.0)
        if going and self._may_leave(slot, soonest):
            return f"its node {going[0][:12]} will be taken away"
        if mark_of(plan) != seated.placed.mark and self._may_leave(slot):
            return "it shall run something else"
        return ""

    def _may_leave(self, slot: str, deadline: float = 0.0) -> bool:
        """Returns whether a worker may leave now, if it has to be gone at ``deadline`` (0: nobody said). One of a
        role after the other, as long as there is time: another that is ready goes on serving meanwhile.
        """
        role = self._seats[slot].seat.wish.role
        alike = {s: seated for s, seated in self._seats.items() if s != slot and seated.seat.wish.role == role}
        known = self._clock() - KNOWN_S
        ready = [s for s, seated in alike.items() if seated.leaving is None and self._ready.get(s, known) < known]
        urgent = deadline and deadline - self._wall_clock() < URGENT_S + self._drain_s + STOP_EXTRA_S
        return bool(ready or urgent or not alike)

    def _is_refused(self, seated: _SeatedSlot) -> bool:
        """Returns whether Ray has not reserved a slot's place in time: it would wait there for ever, while other
        nodes may have room.
        """
        seated.is_reserved = seated.is_reserved or self._actors.has_place(seated.placed)
        return not seated.is_reserved and self._clock() - seated.since >= RESERVED_S

    def _without_room(self, seat: Seat) -> Sequence[str]:
        """Returns the nodes of ``seat`` that have less left than it needs there; all if Ray doesn't say."""
        try:
            left = self._ray._private.state.available_resources_per_node()
        except Exception:  # Ray's own inner interface
            log.debug("Ray doesn't say what nodes have left", exc_info=True)
            return seat.node_ids
        needs = {name: amount * seat.wish.gang for name, amount in seat.wish.needs.items()}
        full = [n for n in seat.node_ids if any(left.get(n, {}).get(name, 0) < needs[name] for name in needs)]
        return full or seat.node_ids

    def _has_ended(self, slot: str) -> bool:
        """A lasting worker that is wanted, and whose supervisor starts nothing any more."""
        status = self._last.get(slot)
        return self._lasting and slot in self._wanted and status is not None and status.state == "ended"

    def _ask_to_leave(self, slot: str, why: str) -> None:
        log.info("%s leaves: %s", slot, why)
        seated, grace_s = self._seats[slot], self._drain_s + STOP_EXTRA_S
        seated.leaving = self._actors.stop(seated.placed, grace_s)
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
        self._actors.remove(self._seats.pop(slot).placed)
        self._last[slot] = SlotStatus(slot, "waiting")
        self._ready.pop(slot, None)

    # ---- what Ray says ---------------------------------------------------------------------------------

    def _nodes(self) -> dict[str, RayNode]:
        return {
            found["NodeID"]: RayNode(found["NodeID"], dict(found["Resources"]), dict(found.get("Labels") or {}))
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

    def _read(self, answer: ObjectRef) -> SlotStatus | None:
        try:
            return msgspec.json.decode(self._ray.get(answer), type=SlotStatus)
        except self._ray.exceptions.RayError:
            return None


def resource_of(role: str) -> str:
    """Returns the name of the custom Ray resource of which a node offers one per worker of ``role`` that it can
    run.
    """
    return f"baton_{role}"


def _named(seat: Seat) -> str:
    """Returns the beginnings of the ids of a seat's nodes."""
    return " and ".join(node_id[:12] for node_id in seat.node_ids)


def _hex(node: object) -> str:
    return str(node.hex() if hasattr(node, "hex") else node)
