"""Which node each slot goes to: a pure function of the nodes, the seats taken, and the slots without one.

Knows nothing of Ray. A prefill worker ships KV to decode workers, so "peers" puts both roles near each other (the
same node, then the same fabric, where one sits that has no partner yet or where one could come) and, among equals,
each role on as many nodes as there are: a node that dies then takes few workers of a role along. "spread" looks at
failures alone, "pack" fills node after node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

STRATEGIES = ("peers", "pack", "spread")
FABRIC = "baton/fabric"  # a node's label: within one fabric KV moves fast


class RayNode(msgspec.Struct, frozen=True):
    """Describes a node that is alive; ``resources`` are its totals, used or not, by name."""

    node_id: str
    resources: dict[str, float]
    labels: dict[str, str] = {}

    @property
    def fabric(self) -> str:
        """Returns the name of the node's fast network, from its label FABRIC; "" if it has none."""
        return self.labels.get(FABRIC, "")


class SlotRequest(msgspec.Struct, frozen=True):
    """Describes a slot that needs ``hosts`` different nodes: ``gang`` bundles of resources ``needs`` on each, which
    carries ``labels``.
    """

    slot: str
    role: str
    needs: dict[str, float]
    gang: int = 1
    labels: dict[str, str] = {}
    hosts: int = 1


class Seat(msgspec.Struct, frozen=True):
    """Describes a slot that has its nodes: its request, the id of the node of its worker, and those of the further
    nodes that have ranks of it.
    """

    wish: SlotRequest
    node_id: str
    further: tuple[str, ...] = ()

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Returns the ids of all its nodes, the worker's first."""
        return (self.node_id, *self.further)


def choose_seats(
    wishes: Sequence[SlotRequest], nodes: Iterable[RayNode], taken: Iterable[Seat], strategy: str = "peers"
) -> dict[str, Seat]:
    """Returns slot -> seat for every request that there is room for, on all of its nodes; the others are left out.

    ``taken`` are the seats in use; ``strategy`` is one of STRATEGIES.
    """
    room, found = _NodeUsage(list(nodes), taken), dict[str, Seat]()
    ranked = _in_turn(wishes)
    for number, wish in enumerate(ranked):
        fitting = [node for node in room.nodes if room.fits(wish, node)]
        if len(fitting) < wish.hosts:
            continue
        peers = _SlotNeighbours(room, wish, ranked[number + 1 :]) if strategy == "peers" else None
        ranked_nodes = sorted(fitting, key=lambda node: _cost(wish, node, room, peers, strategy))
        best = ranked_nodes[0]
        near = sorted(ranked_nodes[1:], key=lambda node: node.fabric != best.fabric)  # ranks exchange much
        seat = Seat(wish, best.node_id, tuple(node.node_id for node in near[: wish.hosts - 1]))
        found[wish.slot] = seat
        room.take(seat)
    return found


def _in_turn(wishes: Sequence[SlotRequest]) -> list[SlotRequest]:
    """One of each role after the other, so that peers find one another."""
    seen: Counter[str] = Counter()
    ranked = []
    for wish in wishes:
        ranked.append((seen[wish.role], wish))
        seen[wish.role] += 1
    return [wish for _, wish in sorted(ranked, key=lambda pair: pair[0])]


class _NodeUsage:
    """Nodes, what is used of each, and how many of each role sit on a node and within a fabric."""

    def __init__(self, nodes: Sequence[RayNode], taken: Iterable[Seat]) -> None:
        self.nodes = nodes
        self.on_node: dict[str, Counter[str]] = {node.node_id: Counter() for node in nodes}
        self.in_fabric: dict[str, Counter[str]] = {node.fabric: Counter() for node in nodes}
        self._fabrics = {node.node_id: node.fabric for node in nodes}
        self._used: dict[str, dict[str, float]] = {node.node_id: {} for node in nodes}
        for seat in taken:
            self.take(seat)

    def take(self, seat: Seat) -> None:
        """Counts ``seat`` as used from now on, except on nodes that have gone."""
        for node_id in seat.node_ids:
            if node_id in self._used:
                _add(self._used[node_id], seat.wish)
        if seat.node_id in self.on_node:
            self.on_node[seat.node_id][seat.wish.role] += 1
            self.in_fabric[self._fabrics[seat.node_id]][seat.wish.role] += 1

    def fits(self, wish: SlotRequest, node: RayNode, besides: SlotRequest | None = None) -> bool:
        """Returns whether all of a node's part of the gang finds room there, also when ``besides`` has sat down."""
        if any(node.labels.get(name) != value for name, value in wish.labels.items()):
            return False
        used = dict(self._used[node.node_id])
        if besides is not None:
            _add(used, besides)
        return all(
            used.get(name, 0.0) + amount * wish.gang <= node.resources.get(name, 0.0) + 1e-9
            for name, amount in wish.needs.items()
        )


def _add(used: dict[str, float], wish: SlotRequest) -> None:
    for name, amount in wish.needs.items():
        used[name] = used.get(name, 0.0) + amount * wish.gang


class _SlotNeighbours:
    """Returns where the peers of ``wish`` that still wait could come."""

    def __init__(self, room: _NodeUsage, wish: SlotRequest, waiting: Sequence[SlotRequest]) -> None:
        self._room, self._wish = room, wish
        others = (other for other in waiting if other.role != wish.role)
        alike = {(w.gang, w.hosts, *sorted(w.needs.items()), *sorted(w.labels.items())): w for w in others}
        self._kinds = list(alike.values())
        self._open = {node.node_id for node in room.nodes if any(room.fits(kind, node) for kind in self._kinds)}
        self._by_fabric = Counter(node.fabric for node in room.nodes if node.node_id in self._open)

    def at(self, node: RayNode) -> bool:
        """The node itself, beside ``wish``."""
        return node.node_id in self._open and any(self._room.fits(k, node, self._wish) for k in self._kinds)

    def near(self, node: RayNode) -> bool:
        """A node of its fabric."""
        return self._by_fabric[node.fabric] - (node.node_id in self._open) > 0 or self.at(node)


def _cost(
    wish: SlotRequest, node: RayNode, room: _NodeUsage, peers: _SlotNeighbours | None, strategy: str
) -> tuple[float | str, ...]:
    """Lower is better; the node's id decides between equals, so that the choice is always the same."""
    here = room.on_node[node.node_id]
    alike, everybody = here[wish.role], here.total()
    if strategy == "pack":
        return (-everybody, node.node_id)
    if peers is None:
        return (alike, everybody, node.node_id)
    nearness, crowd = _nearness(wish, node, room, peers) if node.fabric else (0, 0)
    return (alike - (everybody - alike), -nearness, crowd, alike, -peers.at(node), everybody, node.node_id)


def _nearness(wish: SlotRequest, node: RayNode, room: _NodeUsage, peers: _SlotNeighbours) -> tuple[int, int]:
    """Returns 3 if the fabric holds a peer without a partner, 2 if one could come, 1 if it holds one; and how many
    workers of the same role it has.
    """
    inside = room.in_fabric[node.fabric]
    alike = inside[wish.role]
    others = inside.total() - alike
    return (3 if others > alike else 2 if peers.near(node) else 1 if others else 0), alike
