"""Pools, fabrics and gangs on real Ray nodes, a raylet that dies while its machine lives, and a Ray that is gone.

`make soak-ray`.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator

import pytest

from baton.worker.slots import holders
from tests.e2e.ray_nodes import UP_S, Load, Nodes, only_right, ray_nodes

pytestmark = pytest.mark.soak
pytest.importorskip("ray")

CONFIG = """
[cluster]
prefill = 1
decode = 1
[[cluster.pools]]
name = "long"
role = "prefill"
count = 1
resources = { baton_long = 1 }
labels = { accelerator = "h200" }
worker = { max_batch = 7 }
[[cluster.pools]]
name = "tp"
role = "decode"
count = 1
resources = { baton_tp = 1 }
gang = 2
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as made:
        made.named = {
            "prefill, far": made.add({"baton_prefill": 1}, "a"),
            "prefill": made.add({"baton_prefill": 1}, "b"),
            "decode": made.add({"baton_decode": 2}, "b"),
            "long, other": made.add({"baton_long": 1}, "b"),
            "long": made.add({"baton_long": 1}, "b", accelerator="h200"),
            "tp": made.add({"baton_tp": 2}, "b"),
        }
        (made.folder / "baton.toml").write_text(CONFIG)
        made.serve_with("--config", str(made.folder / "baton.toml"))
        asyncio.run(made.until(4, "four workers"))
        yield made


async def test_peers_share_a_fabric_and_pools_are_on_hardware_of_their_own(nodes: Nodes) -> None:
    places = {name: set(nodes.hosts_of(node)) for name, node in nodes.named.items()}
    assert places == {
        "prefill, far": set(), "prefill": {"prefill-0"}, "decode": {"decode-0"}, "long, other": set(),
        "long": {"long-0"}, "tp": {"tp-0"},
    }  # fmt: skip
    slots = nodes.folder / "run" / "slots"
    batches = {
        slot: json.loads((slots / f"{slot}.spec").read_text()).get("max_batch", 64) for slot in nodes.hosts()
    }
    assert batches == {"prefill-0": 64, "decode-0": 64, "tp-0": 64, "long-0": 7}
    async with Load(nodes).running() as load:
        await asyncio.sleep(5)
    only_right(load)
    print(f"\nfour pools, two fabrics: {places}; {dict(load.outcomes)}")


async def test_a_gang_takes_all_of_its_room_on_one_node_or_none(nodes: Nodes) -> None:
    async with Load(nodes).running() as load:
        assert nodes.kill(nodes.named["tp"]) == ["tp-0"]
        await nodes.until(3, "the loss")
        halves = [nodes.add({"baton_tp": 1}, "b") for _ in range(2)]
        await asyncio.sleep(10)
        assert "tp-0" not in nodes.hosts()
        free = nodes.ray.global_state.available_resources_per_node()
        assert [free[half.node_id].get("baton_tp") for half in halves] == [1.0, 1.0], "no half is held"
        begun = time.monotonic()
        nodes.named["tp"] = nodes.add({"baton_tp": 2}, "b")
        await nodes.until(4, "the gang")
        print(f"\ngang of 2 placed {time.monotonic() - begun:.1f} s after a node with room for it joined")
        assert set(nodes.hosts_of(nodes.named["tp"])) == {"tp-0"}
    only_right(load)
    print(dict(load.outcomes))


async def test_a_raylet_that_dies_alone_leaves_its_worker_serving_and_the_next_node_adopts_it(nodes: Nodes) -> None:
    nodes.named["decode, next"] = nodes.add({"baton_decode": 2}, "b")
    held = nodes.hosts()["decode-0"]
    async with Load(nodes).running() as load:
        await asyncio.sleep(1)
        nodes.kill_raylet(nodes.named["decode"])
        begun = time.monotonic()
        while "(adopted)" not in nodes.log():  # as soon as Ray says that the node is gone
            assert nodes.hosts()["decode-0"] == held, "one host, the same one"
            assert time.monotonic() - begun < UP_S, nodes.log()
            await asyncio.sleep(0.1)
        adopted = time.monotonic() - begun
        await asyncio.sleep(3)
        assert nodes.hosts()["decode-0"] == held
        await nodes.until(4, "all of them")
        before = dict(load.outcomes)
        only_right(load)
        os.kill(held, signal.SIGKILL)  # only who adopted it knows that, and starts it again
        begun = time.monotonic()
        while time.monotonic() - begun < UP_S and nodes.hosts().get("decode-0") in (None, held):
            await asyncio.sleep(0.05)
        assert set(nodes.hosts_of(nodes.named["decode, next"])) == {"decode-0"}, nodes.log()
        back = time.monotonic() - begun
        await nodes.until(4, "the return")
        await asyncio.sleep(1)
    only_right(load)
    print(f"\nraylet killed: its worker was adopted by another node after {adopted:.1f} s and served all the time "
          f"({before}); killed then, it was back after {back:.1f} s; {dict(load.outcomes)}")  # fmt: skip


async def test_a_ray_that_is_gone_altogether_stops_no_request(nodes: Nodes) -> None:
    held = nodes.hosts()
    assert len(held) == 4
    async with Load(nodes).running() as load:
        await asyncio.sleep(1)
        for node in (*nodes.ray.worker_nodes, nodes.ray.head_node):
            for processes in node.all_processes.values():
                for info in processes:
                    info.process.kill()
        begun = time.monotonic()
        while time.monotonic() - begun < 20:
            assert holders(nodes.folder / "run" / "slots") == held
            await asyncio.sleep(0.2)
    only_right(load)
    assert nodes.serve is not None
    assert nodes.serve.poll() is None
    print(f"\nhead and every raylet killed: 20 s later all four workers are the same; {dict(load.outcomes)}")
