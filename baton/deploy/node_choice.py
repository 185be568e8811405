"""Which node each slot goes to: a pure function of the nodes, who sits where, and who needs a place.

Knows nothing of Ray. A prefill worker ships KV to decode workers, so "peers" puts both roles near each other (the
same node, then the same fabric) and, among equals, each role on as many nodes as there are: a node that dies then
takes few workers of a role along. "spread" looks at failures alone, "pack" fills node after node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

STRATEGIES = ("peers", "pack", "spread")
FABRIC = "baton/fabric"  # a node's label: within one fabric KV moves fast


class Node(msgspec.Struct, frozen=True):
    """A node that lives. ``resources`` are what it offers in all."""

    node_id: str
    resources: dict[str, float]
    labels: dict[str, str] = {}

    @property
    def fabric(self) -> str:
        """Empty when nobody said."""
        return self.labels.get(FABRIC, "")


class Wish(msgspec.Struct, frozen=True):
    """A slot that needs a place: ``gang`` times ``needs``, all on one node that carries ``labels``."""

    slot: str
    role: str
    needs: dict[str, float]
    gang: int = 1
    labels: dict[str, str] = {}


class Seat(msgspec.Struct, frozen=True):
    """A wish and the node that it has."""

    wish: Wish
    node_id: str


def choose(
    wishes: Sequence[Wish], nodes: Iterable[Node], taken: Iterable[Seat], strategy: str = "peers"
) -> dict[str, str]:
    """slot -> node id, of every wish that there is room for. The rest are left out."""
    by_id, seats = {node.node_id: node for node in nodes}, list(taken)
    found: dict[str, str] = {}
    for wish in _in_turn(wishes):
        fitting = [node for node in by_id.values() if _fits(wish, node, seats)]
        if not fitting:
            continue
        best = min(fitting, key=lambda node: _cost(wish, node, by_id, seats, strategy))
        found[wish.slot] = best.node_id
        seats.append(Seat(wish, best.node_id))
    return found


def _in_turn(wishes: Sequence[Wish]) -> list[Wish]:
    """One of each role after the other, so that peers find one another."""
    seen: Counter[str] = Counter()
    ranked = []
    for wish in wishes:
        ranked.append((seen[wish.role], wish))
        seen[wish.role] += 1
    return [wish for _, wish in sorted(ranked, key=lambda pair: pair[0])]


def _fits(wish: Wish, node: Node, seats: Sequence[Seat]) -> bool:
    if any(node.labels.get(name) != value for name, value in wish.labels.items()):
        return False
    used: Counter[str] = Counter()
    for seat in seats:
        if seat.node_id == node.node_id:
            used.update({name: amount * seat.wish.gang for name, amount in seat.wish.needs.items()})  # type: ignore[misc]
    return all(
        used[name] + amount * wish.gang <= node.resources.get(name, 0.0) + 1e-9
        for name, amount in wish.needs.items()
    )


def _cost(
    wish: Wish, node: Node, nodes: Mapping[str, Node], seats: Sequence[Seat], strategy: str
) -> tuple[float | str, ...]:
    """Lower is better; the node's id decides between equals, so that the choice is always the same."""
    here = [seat.wish for seat in seats if seat.node_id == node.node_id]
    alike = sum(other.role == wish.role for other in here)
    if strategy == "pack":
        return (-len(here), node.node_id)
    if strategy == "spread":
        return (alike, len(here), node.node_id)
    near = sum(
        seat.wish.role != wish.role and seat.node_id in nodes and nodes[seat.node_id].fabric == node.fabric
        for seat in seats
    )
    return (alike - (len(here) - alike), -bool(near and node.fabric), alike, len(here), node.node_id)
