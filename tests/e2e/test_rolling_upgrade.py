"""A rolling upgrade and a rollback under load: two builds, one protocol version apart, serve together.

Each worker in turn is told to end (it drains, and what it wrote moves on), and a process of the other build takes
its slot; routers are replaced one by the other, as a load balancer sees it. The oracle knows each answer.
``BATON_PREVIOUS=DIR`` takes a checkout of an older version as the other build, instead of one that only lacks the
newer fields.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from subprocess import Popen
from typing import Any, BinaryIO

import httpx
import pytest

from baton.cluster.membership import PolledRoster, connect
from baton.launch.ports import free_ports
from baton.launch.supervise import HostProcess
from baton.protos.version import PROTOCOL, product_version
from tests import warm
from tests.e2e import other_build
from tests.e2e.fleet import Fleet, complete, wait_for
from tests.e2e.paced import Oracle, slow_profile

PREVIOUS = os.environ.get("BATON_PREVIOUS", "")
HOST, ROUTER = "baton.worker.host", "baton.router_host.main"
OLD_BUILD = "0.0.9"
ASKING = 3
MAX_TOKENS = 40


def old(module: str) -> tuple[str, ...]:
    if PREVIOUS:
        return ("env", "-C", PREVIOUS, f"PYTHONPATH={PREVIOUS}", sys.executable, "-m", module)
    return other_build.command("1.0", OLD_BUILD, module)


def new(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module)


class Upgraded(Fleet):
    """Starts with everything of the old build, whose processes fork from one that has imported it."""

    def __init__(self, prefill: int, decode: int, **sections: Any) -> None:
        super().__init__(prefill, decode, **sections)
        self._old = None if PREVIOUS else warm.Warm.started(warm.LIGHT, old("tests.warm")[2:])

    def close(self) -> None:
        super().close()
        if self._old is not None:
            self._old.end()

    def run_host(self, command: list[str], log: BinaryIO) -> HostProcess:
        return self._forked(command, log) or super().run_host(command, log)

    def run_router(self, command: list[str], log: BinaryIO) -> Popen[bytes]:
        return self._forked(command, log, session=False) or super().run_router(command, log)

    def _forked(self, command: list[str], log: BinaryIO, session: bool = True) -> Any:
        """Returns a process of the old build; None if ``command`` is of the new one."""
        prefix = [*old("")[:-1]]
        if self._old is None or command[: len(prefix)] != prefix:
            return None
        return self._old.start([sys.executable, "-m", *command[len(prefix) :]], log, session)

    def next_router(self, command: tuple[str, ...], asked: Callable[[], Iterable[str]]) -> None:
        """Another router beside the first; who asks from now on asks it; the first finishes what it has.

        ``asked`` tells where requests without a first byte went: none is sent to a router that stops (its preStop).
        """
        was = self.url
        before, (port, grpc_port) = self.router, free_ports(2)
        ports = {"port": port, "grpc_port": grpc_port}
        self.config = self.config.model_copy(update={"router": self.config.router.model_copy(update=ports)})
        self.router_command = command
        self.start_router()
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: _is_ready(url), what="the next router")
        self.url, self.port = url, port
        wait_for(self.answers, what="the next router reaching every worker")
        wait_for(lambda: was not in asked(), what="the last request of the first router having begun")
        assert before is not None
        before.terminate()
        assert before.wait(60) == 0

    def upgrade(self, slot: str, command: tuple[str, ...]) -> None:
        """Replaces a worker as a StatefulSet does, and waits until it is ready again."""
        before = self.record(slot).incarnation
        self.replace(slot, command)
        self.wait_for_return(slot, before)

    async def builds(self) -> dict[str, str]:
        """slot -> build, as everybody reads it in Redis."""
        client = connect(self.config.redis.url)
        try:
            return {name: e.info.version for name, e in (await PolledRoster(client, "baton").refresh()).items()}
        finally:
            await client.aclose()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


class Load:
    """``ASKING`` clients that ask one after the other, until told to stop; what went wrong is kept."""

    def __init__(self, fleet: Upgraded, oracle: Oracle) -> None:
        self.right = 0
        self.wrong: list[str] = []
        self.unanswered: dict[int, str] = {}  # client -> the router that it waits for
        self._fleet, self._oracle, self._over = fleet, oracle, False

    async def client(self, number: int) -> None:
        asked = 0
        while not self._over:
            asked += 1
            prompt = self._oracle.prompt(number * 1000 + asked, 60 + 70 * (asked % 4))
            self.unanswered[number] = url = self._fleet.url

            async def begun(_: httpx.Response) -> None:
                self.unanswered.pop(number, None)

            try:
                async with httpx.AsyncClient(timeout=60, verify=False, event_hooks={"response": [begun]}) as http:
                    ids = await complete(http, url, prompt, max_tokens=MAX_TOKENS, temperature=0)
            except (AssertionError, httpx.HTTPError) as error:
                self.unanswered.pop(number, None)
                self.wrong.append(f"failed: {error!r}"[:400])
                continue
            if ids == self._oracle.answer(prompt, MAX_TOKENS):
                self.right += 1
            else:
                self.wrong.append(f"wrong: {len(ids)} tokens")

    async def more(self, than: int = 0) -> int:
        """Returns how many were right, once these are more ``than`` that, or one was wrong."""
        while self.right <= than and not self.wrong:
            await asyncio.sleep(0.05)
        return self.right

    def stop(self) -> None:
        self._over = True


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    profile = slow_profile(tmp_path, fixed=0.005, prefill=0.0001, kv=1024)
    monkeypatch.setattr(Upgraded, "command", old(HOST))
    monkeypatch.setattr(Upgraded, "router_command", old(ROUTER))
    router = {"local_prefill_max_tokens": 16, "shutdown_grace_s": 10}
    worker = {"device": f"paced:{profile}", "kv_transport": "tcp"}  # whose frames have two versions
    with Upgraded(2, 2, worker=worker, router=router) as running:
        yield running, Oracle(profile)


@pytest.mark.parametrize("rest", [(), pytest.param(("prefill-1", "decode-1"), marks=pytest.mark.thorough)])
async def test_a_rolling_upgrade_and_its_rollback_fail_nobody(fleet, rest: tuple[str, ...]) -> None:
    """Both routers meet workers of both builds; ``rest``: slots that are upgraded behind the new router."""
    running, oracle = fleet
    load = Load(running, oracle)
    asked = lambda: list(load.unanswered.values())  # noqa: E731
    clients = [asyncio.create_task(load.client(n)) for n in range(ASKING)]
    try:
        assert set((await running.builds()).values()) == {""}, "before 1.1 nobody said which build they are"
        for slot in ("prefill-0", "decode-0"):
            await asyncio.to_thread(running.upgrade, slot, new(HOST))
        await asyncio.to_thread(running.next_router, new(ROUTER), asked)  # now before workers of both builds
        mixed = await load.more()
        for slot in rest:
            await asyncio.to_thread(running.upgrade, slot, new(HOST))
        assert list((await running.builds()).values()).count(product_version()) == 2 + len(rest)
        for slot in ("decode-0", *rest):  # and back again
            await asyncio.to_thread(running.upgrade, slot, old(HOST))
        await asyncio.to_thread(running.next_router, old(ROUTER), asked)  # an old one, likewise
        assert sorted((await running.builds()).values()) == ["", "", "", product_version()]
        back = await load.more(mixed)
        await load.more(back + 2 * ASKING)
    finally:
        load.stop()
        await asyncio.gather(*clients)
    print(f"{load.right} right answers, {len(load.wrong)} failed or wrong; protocol {PROTOCOL} beside 1.0")
    assert load.wrong == []
    assert 0 < mixed < back
    running.wait_for_baseline()


@pytest.mark.thorough  # of one link: tests/router/workers/test_link_table.py
@pytest.mark.skipif(bool(PREVIOUS), reason="of this build alone")
async def test_a_worker_two_versions_apart_is_refused_by_name_and_the_others_serve(tmp_path: Path) -> None:
    profile = slow_profile(tmp_path, fixed=0.002, prefill=0.0001, kv=1024)
    with Fleet(1, 2, worker={"device": f"paced:{profile}"}) as running:
        oracle, prompt = Oracle(profile), list(range(2, 120))
        running.replace("decode-1", other_build.command("1.7", "7.0.0", HOST))
        wait_for(lambda: "(baton 7.0.0) 1.7" in running.log("router", 20000), what="a refusal by the worker")
        running.replace("prefill-0", other_build.command("1.7", "7.0.0", HOST))
        said = "prefill-0 (baton 7.0.0) speaks protocol 1.7"
        wait_for(lambda: said in running.log("router", 20000), what="a refusal by the router")
        assert running.reachable() == 1
        async with httpx.AsyncClient(timeout=30) as http:
            ids = await complete(http, running.url, prompt, max_tokens=8, temperature=0)
        assert ids == oracle.answer(prompt, 8)
