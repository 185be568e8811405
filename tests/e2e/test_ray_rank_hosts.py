"""A worker whose ranks are on two real Ray nodes: placed on both or none, and again when a rank or a node dies.

`make soak-ray`.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.cluster.config import BatonConfig
from baton.cluster.sections.tls import TlsConfig
from baton.process.security import ray_environment
from baton.tls.authority import Authority
from tests.e2e.fleet import DRAFT, wait_for
from tests.e2e.ray_nodes import TLS_ENV, Nodes, ancestors, ray_nodes
from tests.e2e.test_ranks import one_rank, prompt

pytestmark = pytest.mark.soak
pytest.importorskip("ray")

CONFIG = """
[cluster]
prefill = 0
decode = 1
[[cluster.pools]]
name = "wide"
role = "prefill"
hosts = 2
resources = {{ baton_wide = 1 }}
worker = {{ pp = 2, rank_key_file = "{key}" }}
"""
FOLLOWER = b"baton.engine.backends.ranks.main"


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as made:
        key = made.folder / "key"
        key.write_text(secrets.token_hex(32))
        made.named = {
            "decode": made.add({"baton_decode": 1}),
            "a": made.add({"baton_wide": 1}),
            "b": made.add({"baton_wide": 1}),
        }
        (made.folder / "baton.toml").write_text(CONFIG.format(key=key))
        made.serve_with("--config", str(made.folder / "baton.toml"), "--device", "cpu", "--model", DRAFT)
        asyncio.run(made.until(2, "two workers"))
        made.require_secured()
        yield made


def ranks(nodes: Nodes, name: str) -> list[int]:
    """The processes of ranks that are on a node and have their lead on another."""
    raylets = {info.process.pid for info in nodes.named[name].all_processes["raylet"]}
    hosts = set(nodes.hosts().values())
    found = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    followers = (pid for pid in found if FOLLOWER in commandline(pid))
    return [pid for pid in followers if raylets & set(ancestors(pid)) and not hosts & set(ancestors(pid))]


def commandline(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def answer(nodes: Nodes, tokens: list[int]) -> list[int]:
    body = {"prompt": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 20}
    wanted = body | {"repetition_penalty": 1.0}
    reply = httpx.post(nodes.url + "/v1/completions", json=wanted, timeout=120, verify=nodes.verify)
    assert reply.status_code == 200, reply.text + nodes.log()
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


async def test_ranks_on_two_nodes_answer_as_one_and_are_placed_again_when_a_rank_or_a_node_dies(
    nodes: Nodes,
) -> None:
    (lead,) = (name for name in "ab" if nodes.hosts_of(nodes.named[name]))
    (far,) = {"a", "b"} - {lead}
    assert len(ranks(nodes, far)) == 1
    assert answer(nodes, prompt(1, 200)) == one_rank(prompt(1, 200), 20)

    held, begun = nodes.hosts()["wide-0"], time.monotonic()
    os.kill(ranks(nodes, far)[0], signal.SIGKILL)
    wait_for(lambda: nodes.hosts().get("wide-0") not in (None, held), what="another host of wide-0")
    await nodes.until(2, "the return on the same nodes")
    rank_s = time.monotonic() - begun
    assert len(ranks(nodes, far)) == 1
    assert answer(nodes, prompt(2, 200)) == one_rank(prompt(2, 200), 20)

    begun = time.monotonic()
    nodes.kill(nodes.named[far])
    await nodes.until(1, "the loss of the worker with its far node")
    await asyncio.sleep(5)
    assert "wide-0" not in nodes.hosts(), "half of its nodes are none"
    assert answer(nodes, prompt(3, 200)) == one_rank(prompt(3, 200), 20)
    nodes.named["c"] = nodes.add({"baton_wide": 1})
    await nodes.until(2, "a place on two nodes again")
    node_s = time.monotonic() - begun
    assert answer(nodes, prompt(4, 200)) == one_rank(prompt(4, 200), 20)
    assert sum(len(ranks(nodes, name)) for name in (lead, "c")) == 1
    print(f"\na far rank killed: back after {rank_s:.1f} s; a far node killed: back after {node_s:.1f} s")


def test_the_same_holds_where_ray_and_the_cluster_encrypt(tmp_path: Path) -> None:
    """In a process of its own, because Ray reads its variables as it is imported."""
    from ray.util import get_node_ip_address

    made = Authority(tmp_path / "certs")
    made.make(hosts=[get_node_ip_address()])  # Ray's processes verify the address that they call
    encrypts = ray_environment(BatonConfig(tls=TlsConfig(dir=str(made.folder))))
    assert encrypts["RAY_USE_TLS"] == "1"
    name = test_ranks_on_two_nodes_answer_as_one_and_are_placed_again_when_a_rank_or_a_node_dies.__name__
    command = [sys.executable, "-m", "pytest", "-q", "-m", "soak", "-p", "no:cacheprovider", f"{__file__}::{name}"]
    env = os.environ | encrypts | {TLS_ENV: str(made.folder)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
