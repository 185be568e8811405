"""Faults do to a simulated cluster what their names say, and only those that were asked for are drawn."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError
from typer.testing import CliRunner

from baton.console.drill import _kinds
from baton.console.main import app
from baton.drill import faults
from baton.drill.coverage import Coverage
from baton.drill.draw import draw
from baton.drill.faults import FaultInjector
from baton.drill.loop import SeededLoop, seeded_loop
from baton.drill.machines import memory
from baton.drill.machines.clock import DriftingLoop, MachineClock
from baton.drill.machines.memory import Memory
from baton.drill.machines.network import KEEPALIVE_S, Network
from baton.drill.machines.process import Process, owning_factory
from baton.drill.parts import clients, worker
from baton.drill.parts.aims import Aims
from baton.drill.parts.engine import SimulatedPace
from baton.drill.parts.tier import FaultyStore, TierHealth
from baton.drill.parts.worker import SimulatedWorker
from baton.drill.redis.server import ADDRESS, PROCESS, SimulatedRedis, connections
from baton.drill.run import play
from baton.drill.scenario import APART, FAULTS, REDIS, Fault, Scenario, Size
from baton.kv.tiers.disk import DiskTier
from baton.kv.tiers.memory import MemoryStore
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling
from tests.drill.test_run import one_of_each


def test_a_half_open_connection_is_broken_for_one_end_until_the_other_ones_keepalive_ends() -> None:
    loop, told, got = SeededLoop(random.Random(1)), [], []

    async def main() -> None:
        network = Network(random.Random(1))
        network.listen("server:1", "server", object())
        connection = network.connect("client", "server:1")
        assert connection is not None
        connection.when_broken(lambda: told.append(("client", loop.time())), "client")
        connection.when_broken(lambda: told.append(("server", loop.time())), "server")
        assert network.half_open_between("server", "client") == 1
        assert network.half_open_between("server", "client") == 0
        connection.up.send(lambda: got.append("up"), 1)
        connection.down.send(lambda: got.append("down"), 1)
        await asyncio.sleep(1.0)
        assert not connection.broken
        await asyncio.sleep(KEEPALIVE_S)
        assert connection.broken

    loop.run_until_complete(main())
    loop.close()
    assert told == [("server", 0.0), ("client", KEEPALIVE_S)]
    assert got == []


def test_a_process_without_descriptors_neither_opens_nor_accepts_connections() -> None:
    network = Network(random.Random(1))
    network.listen("server:1", "server", object())
    for process in ("client", "server"):
        network.limit(process, full=True)
        assert network.connect("client", "server:1") is None
        network.limit(process, full=False)
        assert network.connect("client", "server:1") is not None


def test_a_limit_of_descriptors_ends_with_the_last_of_those_that_overlap() -> None:
    network = Network(random.Random(1))
    network.listen("server:1", "server", object())
    network.limit("server", full=True)
    network.limit("server", full=True)
    network.limit("server", full=False)
    assert network.connect("client", "server:1") is None
    network.limit("server", full=False)
    assert network.connect("client", "server:1") is not None


def test_cuts_that_overlap_count_from_the_first_and_end_with_the_last() -> None:
    loop, got = SeededLoop(random.Random(1)), []

    async def main() -> None:
        network = Network(random.Random(1))
        network.listen("server:1", "server", object())
        connection = network.connect("client", "server:1")
        assert connection is not None
        network.cut("client", "server")
        await asyncio.sleep(KEEPALIVE_S - 2.0)
        network.cut("client", "server")
        connection.up.send(lambda: got.append(loop.time()), 1)
        network.heal("client", "server")
        await asyncio.sleep(1.0)
        assert not got
        assert network.is_cut("client", "server")
        network.heal("client", "server")
        await asyncio.sleep(0.1)
        assert got
        network.cut("client", "server")
        network.cut("client", "server")
        network.heal("client", "server")
        await asyncio.sleep(KEEPALIVE_S + 0.1)
        assert connection.broken

    loop.run_until_complete(main())
    loop.close()


def test_a_state_that_two_faults_set_holds_until_the_longer_one_ends() -> None:
    loop, seen = SeededLoop(random.Random(1)), []

    async def main() -> None:
        network = Network(random.Random(1))
        redis = SimulatedRedis(network, 0.0)
        worker = SimpleNamespace(pace=SimulatedPace(), tier_health=TierHealth(), life=None)
        tell = lambda who, what: None  # noqa: E731
        workers = cast(dict[str, SimulatedWorker], {"w": worker})
        injector = FaultInjector(
            workers, [], network, redis, random.Random(1), tell, cast(Coverage, Mock()), cast(Aims, None)
        )
        long = ("slow", "stuck", "tier_fails", "tier_slow", "cancel_again", "redis_restarts", "no_descriptors")
        faults = [Fault(kind, 0.0, "w", seconds=4.0, factor=9.0) for kind in long]
        faults += [Fault(kind, 1.0, "w", seconds=1.0, factor=2.0) for kind in long]
        for fault in faults:
            loop.create_task(injector.play(fault, loop.time()))

        def look() -> None:
            tries = network.connect("x", ADDRESS) is not None
            slow = worker.pace.stuck_until > loop.time(), worker.pace.slow, worker.tier_health.fails
            seen.append((*slow, loop.thread_s > 0.1, loop.again_s > 0.0, tries, network._limits["w"] > 0))

        await asyncio.sleep(3.0)
        look()
        await asyncio.sleep(2.0)
        look()

    loop.run_until_complete(main())
    loop.close()
    assert seen == [(True, 9.0, True, True, True, False, True), (False, 1.0, False, False, False, True, False)]


def test_a_cluster_holds_under_every_fault_that_is_drawn_apart() -> None:
    faults = (
        Fault("half_open", 0.0, "router-0", "decode-0", KEEPALIVE_S, aim="writing", request=1),
        Fault("no_descriptors", 0.2, "decode-0", seconds=3.0),
        Fault("roster_lies", 0.1, "prefill-0", seconds=4.0),
        Fault("wall_jumps", 0.1, "decode-0", seconds=5.0, factor=100.0),
        Fault("torn", 0.1, "decode-0", "prefill-0", seconds=2.0),
        Fault("torn", 0.1, "router-0", REDIS, seconds=2.0),
        Fault("drift", 0.0, "decode-1", seconds=5.0, factor=100.0),
        Fault("drift", 0.0, "router-0", seconds=5.0, factor=-100.0),
    )
    scenario = one_of_each(3, *faults)
    verdict = play(msgspec.structs.replace(scenario, requests=scenario.requests[:6], decode=2), keep_story=True)
    assert verdict.held, verdict.violations
    assert verdict.answered > 0
    assert sum("fault:" in line for line in verdict.lines) == len(faults)


def test_faults_that_are_drawn_apart_leave_the_rest_of_a_scenario_as_it_was() -> None:
    for seed in range(30):
        alike = Size(crowded=0.0, turned=0.0)
        plain, more = (draw(seed, msgspec.structs.replace(alike, apart=share)) for share in (0.0, 1.0))
        usual = tuple(fault for fault in more.faults if fault.kind not in APART)
        assert msgspec.structs.replace(more, faults=usual) == plain
        assert len(usual) < len(more.faults) or not plain.faults


def test_only_the_kinds_that_are_asked_for_are_drawn_as_often_as_their_weights_say() -> None:
    asked = Size(kinds=_kinds("kill:9, cut"), faults=12, split=0.0)
    drawn = [fault.kind for seed in range(40) for fault in draw(seed, asked).faults]
    assert set(drawn) == {"kill", "cut"}
    assert drawn.count("kill") > 2 * drawn.count("cut")
    apart = {fault.kind for seed in range(20) for fault in draw(seed, Size(kinds=_kinds("half_open"))).faults}
    assert apart == {"half_open"}
    assert _kinds(",".join(FAULTS)) == FAULTS


@pytest.mark.parametrize("text", ["nobody", "kill:0", "kill:-1", "kill:x", "kill:101"])
def test_a_fault_that_is_unknown_or_has_an_odd_weight_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--faults") as caught:
        _kinds(text)
    assert caught.value.param == "faults"
    done = CliRunner().invoke(app, ["drill", "--seeds", "1", "--faults", text])
    assert done.exit_code != 0


def with_redis(work: Callable[[Network, SimulatedRedis, Redis], Awaitable[None]]) -> None:
    """Plays ``work`` with a simulated Redis that process "client" reaches, and that is asked once for each call."""
    loop = SeededLoop(random.Random(1))

    async def main() -> None:
        network = Network(random.Random(1))
        server = SimulatedRedis(network, 0.0)
        client = Redis(
            connection_pool=ConnectionPool(connections(network, "client"), protocol=2, retry=Retry(NoBackoff(), 0))
        )
        await work(network, server, client)
        await client.aclose()

    loop.run_until_complete(main())
    loop.close()


def test_an_answer_of_redis_that_is_torn_at_any_byte_is_an_error_and_no_other_answer() -> None:
    async def work(network: Network, server: SimulatedRedis, client: Redis) -> None:
        await client.hset("key", mapping={"a": "bc", "d": ""})
        whole = b"*4\r\n$1\r\na\r\n$2\r\nbc\r\n$1\r\nd\r\n$0\r\n\r\n"
        for count in range(len(whole)):
            await client.ping()
            network.tear(PROCESS, "client", (count + 0.5) / len(whole))
            with pytest.raises(ConnectionError):
                await client.hgetall("key")
        assert await client.hgetall("key") == {b"a": b"bc", b"d": b""}

    with_redis(work)


def test_a_pipeline_that_is_torn_runs_the_commands_that_came_and_a_transaction_runs_all_or_none() -> None:
    async def torn(network: Network, server: SimulatedRedis, client: Redis, transaction: bool) -> set[int]:
        counts = set()
        for share in range(100):
            server.store.flush()
            await client.ping()  # so that its connection is there
            network.tear("client", PROCESS, share / 100)
            pipe = client.pipeline(transaction=transaction)
            for key in "abc":
                pipe.set(key, "1")
            with pytest.raises(ConnectionError):
                await pipe.execute()
            counts.add(len(server.store.values))
        return counts

    async def work(network: Network, server: SimulatedRedis, client: Redis) -> None:
        assert await torn(network, server, client, transaction=False) == {0, 1, 2}
        assert await torn(network, server, client, transaction=True) == {0}

    with_redis(work)


def test_of_a_torn_message_of_a_call_nothing_is_read_and_its_connection_breaks_at_both_ends() -> None:
    loop, told, got = SeededLoop(random.Random(1)), [], []

    async def main() -> None:
        network = Network(random.Random(1))
        network.listen("server:1", "server", object())
        connection = network.connect("client", "server:1")
        assert connection is not None
        for end in ("client", "server"):
            connection.when_broken(partial(told.append, end), end)
        network.tear("client", "server", 0.5)
        connection.down.send(lambda: got.append("down"), 100)
        connection.up.send(lambda: got.append("up"), 100)
        await asyncio.sleep(0.1)
        connection.up.send(lambda: got.append("later"), 100)
        await asyncio.sleep(0.1)

    loop.run_until_complete(main())
    loop.close()
    assert sorted(told) == ["client", "server"]
    assert got in ([], ["down"])


def test_a_process_on_a_clock_that_drifts_waits_by_it_and_others_by_theirs() -> None:
    loop, ended = DriftingLoop(random.Random(1)), []

    async def main() -> None:
        loop.set_task_factory(owning_factory)
        fast, slow = MachineClock(), MachineClock()

        async def waits(name: str) -> None:
            began = loop.time()
            await asyncio.sleep(1.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await loop.create_future()
            ended.append((name, round(loop.time() - began, 6), round(loop.true_time() - 5.0, 6)))

        await asyncio.sleep(5.0)
        fast.drift(1.25)
        slow.drift(0.5)
        tasks = [Process(name, clock).spawn(waits(name)) for name, clock in (("f", fast), ("s", slow), ("-", None))]
        await asyncio.gather(*tasks)
        fast.drift(1.0)
        await asyncio.sleep(1.0)
        assert fast.now() - loop.true_time() == pytest.approx(4.0 * 0.25)
        assert slow.now() - loop.true_time() == pytest.approx(-5.0 * 0.5)

    loop.run_until_complete(main())
    loop.close()
    assert ended == [("f", 2.0, 1.6), ("-", 2.0, 2.0), ("s", 2.0, 4.0)]


def test_a_timer_goes_off_when_its_clock_shows_its_time_also_if_the_clock_changed_meanwhile() -> None:
    loop, ended = DriftingLoop(random.Random(1)), []

    async def main() -> None:
        loop.set_task_factory(owning_factory)
        early, late, other = (MachineClock() for _ in range(3))

        async def waits(name: str) -> None:
            await asyncio.sleep(4.0)
            ended.append((name, round(loop.true_time(), 6)))

        early.drift(0.5)
        late.drift(2.0)
        clocks = (("early", early), ("late", late), ("other", other))
        tasks = [Process(name, clock).spawn(waits(name)) for name, clock in clocks]
        await asyncio.sleep(1.0)
        early.drift(1.0)  # shows 0.5
        late.drift(1.0)  # shows 2.0
        await asyncio.gather(*tasks)

    loop.run_until_complete(main())
    loop.close()
    assert ended == [("late", 3.0), ("other", 4.0), ("early", 4.5)]


def behind(deadline_s: float) -> Scenario:
    """A request with a deadline, at a router whose clock has lost three seconds by then."""
    scenario = one_of_each(3, Fault("drift", 0.0, "router-0", seconds=30.0, factor=-100.0))
    asks = Sampling(temperature=0.0, max_tokens=1000, ignore_eos=True)
    late = msgspec.structs.replace(scenario.requests[0], at=31.0, sampling=asks, deadline_after=deadline_s)
    return msgspec.structs.replace(scenario, requests=(late,), step_s=0.1)


def test_a_deadline_holds_on_a_clock_that_drifted_and_not_if_it_is_another_machines_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert play(behind(2.0)).held
    ask = clients.asked
    monkeypatch.setattr(clients, "asked", lambda request, now, *rest: ask(request, loop_now(), *rest))
    assert any("after its deadline" in text for text in play(behind(2.0)).violations)


def loop_now() -> float:
    return seeded_loop().true_time()


@pytest.mark.parametrize("short", ["router-0#1", "decode-0#1", "decode-0#1 engine"])
def test_a_cluster_holds_while_allocations_of_a_process_fail(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Counter[str]()
    there_is = Memory.there_is

    def noted(self: Memory, process: str) -> bool:
        there = there_is(self, process)
        failed[process] += not there
        return there

    monkeypatch.setattr(Memory, "there_is", noted)
    monkeypatch.setattr(FaultInjector, "_short", lambda self, target: short)
    scenario = one_of_each(3, Fault("no_memory", 0.1, short.partition("#")[0], seconds=2.0))
    verdict = play(msgspec.structs.replace(scenario, requests=scenario.requests[:6]))
    assert verdict.held, verdict.violations
    assert failed[short] > 0
    assert sum(failed.values()) == failed[short]


def test_the_tiers_and_the_calls_of_a_worker_without_memory_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHARE", 1.0)
    failing = Memory(random.Random(1))
    store = FaultyStore(
        MemoryStore(np.zeros((1, 64), np.uint8), memoryview(bytearray(64))),
        TierHealth(),
        lambda: True,
        partial(failing.allocate, "w"),
    )
    store.fetch(0)
    failing.short("w", True)
    with pytest.raises(MemoryError):
        store.fetch(0)
    failing.short("w", True)
    failing.short("w", False)
    with pytest.raises(MemoryError):
        store.fetch(0)
    failing.short("w", False)
    store.fetch(0)


@pytest.mark.parametrize("crash", [False, True])
def test_a_worker_that_was_killed_finds_its_disk_tier_again_and_a_crash_of_the_machine_may_damage_it(
    crash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers: list[DiskTier] = []
    opens = DiskTier.__init__

    def noted(self: DiskTier, folder: Path, *given: Any) -> None:
        opens(self, folder, *given)
        if folder.name == "prefill-0":
            tiers.append(self)

    monkeypatch.setattr(DiskTier, "__init__", noted)
    monkeypatch.setattr(faults, "CRASHES", float(crash))
    monkeypatch.setattr(worker, "damage", lambda folder, rng: (folder / "pages.kv").write_bytes(b"x" * 100_000))
    scenario = one_of_each(3, Fault("kill", 3.0, "prefill-0", seconds=0.0))
    prompt = tuple(range(100))
    again = [msgspec.structs.replace(r, prompt=prompt, at=3.0 * r.number) for r in scenario.requests[:4]]
    verdict = play(msgspec.structs.replace(scenario, requests=tuple(again), disk_pages=60, tier_pages=0))
    assert verdict.held, verdict.violations
    first, second = tiers
    assert first.slab.stored >= 6
    assert (second.slab.loaded > 0, second.slab.damaged > 0) == (not crash, crash)
