"""A Ray cluster of five nodes on this machine (head, two for prefill, two for decode), and what happens to nodes.

`make soak-ray`.
"""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ray_nodes import QUIET, UP_S, Load, Nodes, only_right, ray_nodes

pytestmark = pytest.mark.soak
pytest.importorskip("ray")


def room(role: str) -> dict[str, float]:
    """Returns the Ray resources of a node for three workers of ``role``."""
    return {f"baton_{role}": 3}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as made:
        made.by_role = {role: [made.add(room(role)) for _ in range(2)] for role in ("prefill", "decode")}
        made.serve_with("--prefill", "2", "--decode", "2")
        asyncio.run(made.until(4, "2P2D"))
        yield made


async def test_two_prefill_and_two_decode_nodes_serve(nodes: Nodes) -> None:
    places = {role: [nodes.hosts_of(node) for node in found] for role, found in nodes.by_role.items()}
    assert [len(slots) for slots in places["prefill"]] == [1, 1], "one on each, so that a node's death leaves one"
    assert [len(slots) for slots in places["decode"]] == [1, 1]
    async with Load(nodes).running() as load:
        await asyncio.sleep(5)
    only_right(load)
    print(f"\n2P2D on four nodes: {load.outcomes}")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_pools_heal_when_a_node_dies_and_no_answer_is_wrong(nodes: Nodes, role: str) -> None:
    async with Load(nodes).running() as load:
        await asyncio.sleep(2)
        victim = nodes.by_role[role].pop()
        begun = time.monotonic()
        lost = nodes.kill(victim)
        assert len(lost) == 1, lost
        await nodes.until(3, "the loss")
        seen = time.monotonic() - begun
        await nodes.until(4, "the healing")
        healed = time.monotonic() - begun
        await asyncio.sleep(2)
    assert "WRONG" not in load.outcomes, load.outcomes
    only_right(load)
    print(
        f"\n{role} node killed ({lost}): out of routing after {seen:.1f} s, "
        f"four workers after {healed:.1f} s; {dict(load.outcomes)}"
    )
    nodes.by_role[role].append(nodes.add(room(role)))


async def test_a_node_that_is_told_to_go_is_left_without_a_failed_request(nodes: Nodes) -> None:
    victim = nodes.by_role["decode"][0]
    moved = nodes.hosts_of(victim)
    assert moved
    async with Load(nodes).running() as load:
        await asyncio.sleep(2)
        begun = time.monotonic()
        command = [
            str(Path(sys.executable).parent / "ray"), "drain-node", "--address", nodes.ray.address, "--node-id",
            victim.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot",
            "--deadline-remaining-seconds", "90",
        ]  # fmt: skip
        child = await asyncio.create_subprocess_exec(*command, env={**os.environ, **QUIET})
        assert await child.wait() == 0
        while time.monotonic() - begun < UP_S and set(moved.values()) & set(nodes.hosts().values()):
            await asyncio.sleep(0.1)
        left = time.monotonic() - begun
        await nodes.until(4, "the move")
        assert not nodes.hosts_of(victim)
        print(f"\nnotice to a node of {sorted(moved)}: empty after {left:.1f} s, four workers after "
              f"{time.monotonic() - begun:.1f} s; {dict(load.outcomes)}")  # fmt: skip
        await asyncio.sleep(1)
    only_right(load)
    nodes.by_role["decode"].remove(victim)
    nodes.ray.remove_node(victim, allow_graceful=False)
    nodes.by_role["decode"].append(nodes.add(room("decode")))


async def test_scaling_from_two_to_three_to_one_under_load_fails_no_request(nodes: Nodes) -> None:
    async with Load(nodes).running() as load:
        for role in ("prefill", "decode"):
            for count, workers in ((3, 5), (1, 3), (2, 4)):
                begun = time.monotonic()
                said = await nodes.scale(f"{role}={count}")
                await nodes.until(workers, said)
                print(f"\n{role} -> {count}: {time.monotonic() - begun:.1f} s ({said}); {dict(load.outcomes)}")
                await asyncio.sleep(2)
    only_right(load)
