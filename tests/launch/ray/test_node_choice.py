"""Tests baton.launch.ray.node_choice: who goes where."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from baton.launch.ray.node_choice import FABRIC, STRATEGIES, RayNode, Seat, SlotRequest, choose_seats


def choose(*arguments) -> dict[str, str]:
    """Slot -> its node, of slots on one node each."""
    found = choose_seats(*arguments)
    assert not any(seat.further for seat in found.values())
    return {slot: seat.node_id for slot, seat in found.items()}


def node(name: str, prefill: int = 2, decode: int = 2, fabric: str = "") -> RayNode:
    return RayNode(name, {"baton_prefill": prefill, "baton_decode": decode}, {FABRIC: fabric} if fabric else {})


def wishes(prefill: int, decode: int, **fields) -> list[SlotRequest]:
    roles = ["prefill"] * prefill + ["decode"] * decode
    return [
        SlotRequest(f"{role}-{i}", role, {f"baton_{role}": 1}, **fields)
        for role in ("prefill", "decode")
        for i in range(roles.count(role))
    ]


def by_node(found: dict[str, str]) -> dict[str, set[str]]:
    return {name: {slot for slot, at in found.items() if at == name} for name in found.values()}


def test_peers_share_a_node_and_each_role_is_on_every_node() -> None:
    found = by_node(choose(wishes(2, 2), [node("a"), node("b")], []))
    assert {frozenset(slot.split("-")[0] for slot in slots) for slots in found.values()} == {
        frozenset({"prefill", "decode"})
    }
    assert len(found) == 2


def test_pools_on_hardware_of_their_own_go_where_their_resources_are() -> None:
    nodes = [node("p0", 1, 0), node("p1", 1, 0), node("d0", 0, 1), node("d1", 0, 1)]
    for strategy in STRATEGIES:
        found = choose(wishes(2, 2), nodes, [], strategy)
        assert {found["prefill-0"], found["prefill-1"]} == {"p0", "p1"}
        assert {found["decode-0"], found["decode-1"]} == {"d0", "d1"}


def test_a_peer_in_the_same_fabric_is_nearer_than_one_in_another() -> None:
    nodes = [node("a0", 1, 0, "a"), node("b0", 1, 0, "b"), node("b1", 0, 1, "b"), node("a1", 0, 1, "a")]
    sitting = [Seat(SlotRequest("decode-0", "decode", {"baton_decode": 1}), "b1")]
    assert choose(wishes(1, 0), nodes, sitting) == {"prefill-0": "b0"}


def test_pack_fills_a_node_and_spread_avoids_that() -> None:
    nodes = [node("a", 4, 4), node("b", 4, 4)]
    assert set(choose(wishes(2, 2), nodes, [], "pack").values()) == {"a"}
    found = choose(wishes(2, 0), nodes, [], "spread")
    assert set(found.values()) == {"a", "b"}


def test_a_label_is_a_must_and_a_gang_needs_all_its_room_on_one_node() -> None:
    nodes = [node("small", 1, 1), RayNode("big", {"baton_prefill": 4}, {"accelerator": "h200"})]
    assert choose(wishes(1, 0, labels={"accelerator": "h200"}), nodes, []) == {"prefill-0": "big"}
    assert choose(wishes(1, 0, labels={"accelerator": "b200"}), nodes, []) == {}
    assert choose(wishes(2, 0, gang=3), nodes, []) == {"prefill-0": "big"}


def test_who_finds_no_room_is_left_out_and_the_others_are_placed() -> None:
    assert set(choose(wishes(3, 1), [node("a", 2, 1)], [])) == {"prefill-0", "prefill-1", "decode-0"}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(0, 6),
    st.integers(0, 6),
    st.sampled_from(STRATEGIES),
)
def test_no_node_is_ever_given_more_than_it_offers_and_no_room_is_left_unused(
    rooms, prefill, decode, strategy
) -> None:
    nodes = [node(f"n{i}", p, d) for i, (p, d) in enumerate(rooms)]
    found = choose(wishes(prefill, decode), nodes, [], strategy)
    used = Counter((at, slot.split("-")[0]) for slot, at in found.items())
    for one in nodes:
        assert used[one.node_id, "prefill"] <= one.resources["baton_prefill"]
        assert used[one.node_id, "decode"] <= one.resources["baton_decode"]
    for role, asked in (("prefill", prefill), ("decode", decode)):
        room = sum(one.resources[f"baton_{role}"] for one in nodes)
        assert sum(slot.startswith(role) for slot in found) == min(asked, room)
    assert found == choose(wishes(prefill, decode), list(reversed(nodes)), [], strategy), (
        "the order of nodes is no matter"
    )


def fabric_of(found: dict[str, str]) -> dict[str, str]:
    """slot -> the fabric, which is the first letter of a node's name here."""
    return {slot: at[0] for slot, at in found.items()}


def test_the_first_of_two_peers_goes_where_the_other_can_come() -> None:
    nodes = [node("a0", 1, 0, "a"), node("b0", 1, 0, "b"), node("b1", 0, 1, "b")]
    assert fabric_of(choose(wishes(1, 1), nodes, [])) == {"prefill-0": "b", "decode-0": "b"}
    alone, both = node("n0", 1, 0), node("n1", 1, 1)
    assert choose(wishes(1, 1), [alone, both], []) == {"prefill-0": "n1", "decode-0": "n1"}
    gpu = [
        RayNode("n0", {"baton_prefill": 1, "baton_decode": 1, "GPU": 1}),
        RayNode("n1", {"baton_decode": 1, "GPU": 1}),
    ]
    asked = [SlotRequest(f"{r}-0", r, {f"baton_{r}": 1, "GPU": 1}) for r in ("prefill", "decode")]
    assert choose(asked, gpu, []) == {"prefill-0": "n0", "decode-0": "n1"}, "one GPU is not two workers' room"


def test_every_fabric_with_a_decode_worker_has_a_prefill_worker_where_there_is_room() -> None:
    nodes = [node(f"{f}{i}", 1, 0, f) for f in "ab" for i in range(2)]
    nodes += [node(f"{f}9", 0, 1, f) for f in "ab"]
    found = fabric_of(choose(wishes(2, 2), nodes, []))
    assert found["prefill-0"] != found["prefill-1"]
    assert found["decode-0"] != found["decode-1"]
    found = fabric_of(choose(wishes(4, 2), nodes, []))
    assert Counter(found[f"prefill-{i}"] for i in range(4)) == {"a": 2, "b": 2}


def test_who_is_placed_anew_goes_to_the_peer_that_has_none_left() -> None:
    nodes = [node(f"{f}{i}", 2, 2, f) for f in "ab" for i in range(2)]
    sitting = [
        Seat(SlotRequest(f"{role}-{i}", role, {f"baton_{role}": 1}), at)
        for i, (role, at) in enumerate((("prefill", "a0"), ("decode", "a1"), ("decode", "b0")))
    ]
    assert choose([SlotRequest("prefill-9", "prefill", {"baton_prefill": 1})], nodes, sitting) == {
        "prefill-9": "b0"
    }


def test_a_worker_on_several_nodes_has_room_on_all_of_them_or_none() -> None:
    nodes = [node("a", 2, fabric="x"), node("b", 1, fabric="y"), node("c", 2, fabric="x"), node("d", 2, fabric="y")]
    for strategy in STRATEGIES:
        asked = wishes(3, 0, gang=2, hosts=2)
        seats = choose_seats(asked, nodes, [], strategy)
        (slot, seat), *more = seats.items()
        assert (slot, more) == ("prefill-0", []), "one bundle at b is no half of a worker"
        assert {*seat.node_ids} == {"a", "c"} or strategy == "pack", "of one fabric, where there is such a node"
        assert choose_seats(asked[1:], nodes, [seat], strategy) == {}
        left = choose_seats(wishes(1, 0), nodes, [seat], strategy)["prefill-0"].node_id
        assert left not in seat.node_ids, "what it uses is used on each"
