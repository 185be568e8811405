"""A slot is served once, also by hosts whose file locks don't meet (two folders here, two nodes in earnest)."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis as sync_redis

from baton.cluster.membership import connect
from baton.cluster.store.slot_lease import SlotLease
from baton.launch.redis_server import RedisServer
from baton.process.children import child_environment
from baton.process.processes import kill_session
from baton.worker.slot_guard import SlotGuard
from baton.worker.slots import SlotRecord, WorkerSlot
from baton.worker.spec import WorkerSpec, dump_spec


async def test_a_lease_is_one_holders_until_it_ends_or_its_own_place_takes_it_over(server: RedisServer) -> None:
    redis = connect(server.url)
    first = SlotLease(redis, "a", "decode-0", "one", "node-1 /slots", 60)
    other = SlotLease(redis, "a", "decode-0", "two", "node-2 /slots", 60)
    heir = SlotLease(redis, "a", "decode-0", "three", "node-1 /slots", 60)
    assert await first.take() == ""
    assert await other.take() == "node-1 /slots"
    await other.drop()
    assert await first.keep(), "who doesn't hold it can't drop it"
    assert await heir.take() == "", "its file lock proves that the holder before it is gone"
    assert not await first.keep()
    await heir.drop()
    assert await SlotLease(redis, "a", "decode-0", "four", "node-1 /slots", 0.05).take() == ""
    async with asyncio.timeout(30):
        while await other.take():  # a lease ends
            await asyncio.sleep(0.01)
    await redis.flushall()
    assert await other.keep(), "a Redis that forgot is told again"
    await redis.aclose()


async def test_a_holder_takes_its_slot_back_from_who_asked_a_redis_that_had_lost_it(server: RedisServer) -> None:
    redis = connect(server.url)
    await redis.flushall()
    holder = SlotLease(redis, "d", "decode-0", "one", "node-1 /slots", 60)
    claimant = SlotLease(redis, "d", "decode-0", "two", "node-2 /slots", 60)
    assert await holder.take() == ""
    assert await claimant.take() == "node-1 /slots"
    await redis.flushall()
    assert await claimant.take() == "", "it was the first to ask"
    assert await claimant.keep()
    assert await holder.keep()
    assert not await claimant.keep(), "it has only begun, and leaves"
    assert await holder.keep()
    # A lease that ran out is lost to its claimant, however young his is.
    await redis.delete("{d}:slot:decode-0")
    assert await claimant.take() == ""
    assert not await holder.keep()
    # So is one that Redis lost while its holder was out of reach for longer than a lease lasts.
    await redis.flushall()
    assert await holder.take() == ""
    await redis.hset("{d}:slot:decode-0", "since", 1)
    assert not await claimant.keep()
    await redis.aclose()


async def test_who_was_told_of_a_holder_waits_out_its_lease_when_redis_goes_away(own_server: RedisServer) -> None:
    redis, told, loop = connect(own_server.url), asyncio.Event(), asyncio.get_running_loop()
    await SlotLease(redis, "c", "decode-0", "dead", "node-1 /slots", 60).take()
    spec = WorkerSpec.of(
        "decode-0", "decode", "/slots", device="paced:zero", redis_url=own_server.url, lease_s=0.5, beat_s=0.01,
        namespace="c",
    )  # fmt: skip
    guard = SlotGuard(spec, asyncio.Event(), lambda place: told.set())
    entering = asyncio.create_task(guard.__aenter__())
    await asyncio.wait_for(told.wait(), 30)
    own_server.stop()
    stopped = loop.time()
    assert await asyncio.wait_for(entering, 30), "without Redis its lease can't be renewed either"
    assert loop.time() - stopped >= 0.5 - 0.01
    await guard.__aexit__(None, None, None)
    await redis.aclose()


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A Redis that the test may stop."""
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        running = RedisServer(Path(folder)).start()
        yield running
        running.stop()


class Hosts:
    """Hosts of slot decode-0, each in a folder of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str) -> None:
        folder = self._folder / node
        folder.mkdir(exist_ok=True)
        spec = WorkerSpec.of(
            "decode-0", "decode", str(folder), device="paced:zero", redis_url=self._url, lease_s=60.0, beat_s=0.1,
            namespace="b", drain_grace_s=0.1,
        )  # fmt: skip
        self.processes[node] = subprocess.Popen(
            [sys.executable, "-m", "baton.worker.host", "--spec", dump_spec(spec)],
            env=child_environment(), stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def record(self, node: str) -> SlotRecord | None:
        return WorkerSlot(self._folder / node, "decode-0").read()

    def wait(self, node: str, good: Callable[[SlotRecord], bool]) -> SlotRecord:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            record = self.record(node)
            if record is not None and good(record):
                return record
            time.sleep(0.05)
        raise AssertionError(f"{node}: {self.record(node)}")


@pytest.fixture
def hosts(server: RedisServer, tmp_path: Path) -> Iterator[Hosts]:
    sync_redis.Redis.from_url(server.url).flushall()
    made = Hosts(tmp_path, server.url)
    yield made
    for process in made.processes.values():
        kill_session(process.pid)
        process.wait()


def ready(record: SlotRecord) -> bool:
    return record.state == "ready"


def test_a_host_on_another_node_waits_until_the_first_is_gone_and_serves_then(hosts: Hosts) -> None:
    hosts.start("one")
    hosts.wait("one", ready)
    hosts.start("two")
    waiting = hosts.wait("two", lambda record: record.error is not None)
    assert waiting.state == "starting"
    assert waiting.error is not None
    assert "decode-0 is served from" in waiting.error.message
    time.sleep(0.5)
    assert not ready(hosts.wait("two", lambda record: True)), "as long as the first holds it, it waits"
    os.kill(hosts.processes["one"].pid, signal.SIGKILL)
    hosts.processes["one"].wait(60)
    assert sync_redis.Redis.from_url(hosts._url).pexpire("{b}:slot:decode-0", 100), (
        "as if its lease's time were over"
    )
    assert hosts.wait("two", ready).error is None


def test_a_host_that_leaves_in_order_frees_the_slot_at_once(hosts: Hosts) -> None:
    hosts.start("one")
    hosts.wait("one", ready)
    hosts.processes["one"].send_signal(signal.SIGTERM)
    hosts.processes["one"].wait(60)
    url = sync_redis.Redis.from_url(hosts._url)
    assert not url.exists("{b}:slot:decode-0")


def test_a_host_whose_slot_was_taken_from_it_leaves(hosts: Hosts, server: RedisServer) -> None:
    hosts.start("one")
    hosts.wait("one", ready)
    sync_redis.Redis.from_url(server.url).hset("{b}:slot:decode-0", "owner", "somebody else")
    assert hosts.processes["one"].wait(60) == 0
