"""Injects the faults of a simulated run, with one method per kind of fault.

A fault counts as over when none of its effects is left; only then does the judge start to count the time within
which everything must end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from baton.cluster.membership import entry_prefix
from baton.drill.checks.roles import RoleWitness
from baton.drill.coverage import Coverage
from baton.drill.loop import SeededLoop
from baton.drill.machines.network import KEEPALIVE_S, Network
from baton.drill.parts.aims import Aims
from baton.drill.parts.life import NAMESPACE
from baton.drill.parts.operators.workers import WorkerOperators
from baton.drill.parts.router import SimulatedRouter
from baton.drill.parts.worker import SimulatedWorker
from baton.drill.redis.server import SimulatedRedis
from baton.drill.scenario import ABRUPT, FAR, FAULTS, OF_PROCESSES, PEER, REDIS, Fault, FaultKind
from baton.protos.nouns import WorkerInfo

Play = Callable[[Fault], Awaitable[None]]
CRASHES = 0.5  # share of the kills of workers with disk tiers in which the machine crashes
LIE_EVERY_S = 0.5  # seconds between two lies of the index
TEAR_EVERY_S = 0.5  # seconds for which a message of one direction is waited for, to be torn


class FaultInjector:
    """Injects the faults of a run into its workers, routers, network and Redis.

    ``roles`` judges what operators are told of roles and drains; None: nobody does.
    """

    def __init__(
        self,
        workers: dict[str, SimulatedWorker],
        routers: Sequence[SimulatedRouter],
        network: Network,
        redis: SimulatedRedis,
        rng: random.Random,
        tell: Callable[[str, str], None],
        coverage: Coverage,
        aims: Aims,
        roles: RoleWitness | None = None,
    ) -> None:
        self._aims = aims
        self._workers, self._network, self._redis, self._rng = workers, network, redis, rng
        self._routers = {router.name: router for router in routers}
        self._tell, self._coverage = tell, coverage
        self._operators = WorkerOperators(workers, routers, network, rng, tell, roles)
        self.put_all_back = self._operators.put_all_back
        self._asked: dict[tuple[FaultKind, str], list[float]] = {}
        self._plays = self._plays_by_kind()
        assert self._plays.keys() == set(FAULTS), "each kind of fault has its play"

    def _plays_by_kind(self) -> dict[FaultKind, Play]:
        return {
            "kill": self._kill,
            "engine_dies": self._engine_dies,
            "stuck": self._stuck,
            "slow": self._slow,
            "cut": self._cut,
            "cut_one_way": self._cut_one_way,
            "break": self._break,
            "index_lies": self._index_lies,
            "roster_silent": self._roster_silent,
            "router_dies": self._router_dies,
            "redis_stalls": self._redis_stalls,
            "redis_flushed": self._redis_flushed,
            "redis_restarts": self._redis_restarts,
            "redis_forgets": self._redis_forgets,
            "clock_jumps": self._clock_jumps,
            "tier_slow": self._tier_slow,
            "tier_fails": self._tier_fails,
            "role": self._operators.role,
            "ratio": self._operators.ratio,
            "hold": self._operators.hold,
            "drain": self._operators.drain,
            "leave": self._leave,
            "weights": self._weights,
            "cancel_again": self._cancel_again,
            "half_open": self._half_open,
            "no_descriptors": self._no_descriptors,
            "roster_lies": self._roster_lies,
            "wall_jumps": self._wall_jumps,
            "torn": self._torn,
            "drift": self._drift,
            "no_memory": self._no_memory,
            "host_dies": self._host_dies,
            "stands": self._stands,
        }

    async def play(self, fault: Fault, began: float) -> None:
        """Waits until ``fault.at`` seconds after ``began`` (loop time) and for its aim, injects ``fault``, and
        returns when it is over.
        """
        await asyncio.sleep(began + fault.at - asyncio.get_running_loop().time())
        if fault.aim:
            fault = await self._at_aim(fault)
        self._tell(fault.target, f"fault: {fault.kind} {fault.other} for {fault.seconds:.3f} s")
        self._coverage.fault(fault, self._workers)
        await self._plays[fault.kind](fault)

    async def _at_aim(self, fault: Fault) -> Fault:
        """Waits for the phase that ``fault`` is aimed at; returns the fault with its target."""
        whose = fault.target if fault.aim in OF_PROCESSES else fault.request
        target = await self._aims.wait(whose, fault.aim) or fault.target
        await asyncio.sleep(fault.after)
        peers = (self._aims.who(fault.request, phase) for phase in ("reading", "admitted"))
        peer = next((one for one in peers if one and one != target), next(iter(self._routers)))
        others = {PEER: peer, PEER + FAR: peer + FAR, FAR: target + FAR}
        return msgspec.structs.replace(fault, target=target, other=others.get(fault.other, fault.other))

    async def _at_most(self, fault: Fault, level: float, rest: float, put: Callable[[float], None]) -> None:
        """Puts a state at ``level`` for ``fault.seconds``. Where faults of one kind and target overlap, the highest
        level holds, and ``rest`` comes back with the end of the last.
        """
        levels = self._asked.setdefault((fault.kind, fault.target), [])
        levels.append(level)
        put(max(levels))
        await asyncio.sleep(fault.seconds)
        levels.remove(level)
        put(max(levels, default=rest))

    # ---- processes ----

    async def _kill(self, fault: Fault) -> None:
        worker = self._workers[fault.target]
        worker.kill(fault.seconds, crash=bool(worker.scenario.disk_pages) and self._rng.random() < CRASHES)
        await asyncio.sleep(fault.seconds)

    async def _engine_dies(self, fault: Fault) -> None:
        if (life := self._workers[fault.target].life) is not None:
            life.engine.kill()

    async def _host_dies(self, fault: Fault) -> None:
        if (life := self._workers[fault.target].life) is not None:
            life.lose_host()

    async def _stuck(self, fault: Fault) -> None:
        pace, until = self._workers[fault.target].pace, asyncio.get_running_loop().time() + fault.seconds
        pace.stuck_until = max(pace.stuck_until, until)
        await asyncio.sleep(fault.seconds)

    async def _slow(self, fault: Fault) -> None:
        pace = self._workers[fault.target].pace
        await self._at_most(fault, fault.factor, 1.0, lambda level: setattr(pace, "slow", level))

    async def _router_dies(self, fault: Fault) -> None:
        self._routers[fault.target].kill(fault.seconds)
        await asyncio.sleep(fault.seconds)

    async def _stands(self, fault: Fault) -> None:
        """Has the target's process stand still, as one does whose machine sleeps or is short of time."""
        process = self._routers[fault.target].process
        process.stand()
        await asyncio.sleep(fault.seconds)
        process.go_on()

    async def _no_memory(self, fault: Fault) -> None:
        """Has allocations of the target's process, or of its engine, fail for ``fault.seconds``."""
        process = self._short(fault.target)
        self._network.memory.short(process, True)
        await asyncio.sleep(fault.seconds)
        self._network.memory.short(process, False)

    def _short(self, target: str) -> str:
        """Draws which of the target's processes is short of memory."""
        of_engine = target in self._workers and self._rng.random() < 0.5
        return self._process(target) + (" engine" if of_engine else "")

    # ---- network ----

    async def _cut(self, fault: Fault) -> None:
        await self._cut_ways(fault.target, fault.other, fault.seconds, both=True)

    async def _cut_one_way(self, fault: Fault) -> None:
        await self._cut_ways(fault.target, fault.other, fault.seconds, both=False)

    async def _roster_silent(self, fault: Fault) -> None:
        await self._cut_ways(fault.target, REDIS, fault.seconds, both=True)

    async def _cut_ways(self, target: str, other: str, seconds: float, both: bool) -> None:
        a, b = self._process(target), self._process(other)
        ways = [(a, b), (b, a)] if both else [(a, b)]
        for way in ways:
            self._network.cut(*way)
        await asyncio.sleep(seconds)
        for way in ways:
            self._network.heal(*way)

    async def _break(self, fault: Fault) -> None:
        self._network.break_between(self._process(fault.target), self._process(fault.other))

    async def _half_open(self, fault: Fault) -> None:
        """Breaks the target's connections with ``other`` at the target's end; the other end learns of it later."""
        self._network.half_open_between(self._process(fault.target), self._process(fault.other))
        await asyncio.sleep(KEEPALIVE_S)

    async def _torn(self, fault: Fault) -> None:
        """Tears messages between the target and ``other``, one every TEAR_EVERY_S at most, in directions and after
        shares of their bytes that are drawn.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + fault.seconds
        while loop.time() < until:
            ends = [self._process(fault.target), self._process(fault.other)]
            self._rng.shuffle(ends)
            self._network.tear(ends[0], ends[1], self._rng.random())
            await asyncio.sleep(min(TEAR_EVERY_S, max(0.0, until - loop.time())))
            self._network.tear(ends[0], ends[1], None)

    async def _no_descriptors(self, fault: Fault) -> None:
        process = self._process(fault.target)
        self._network.limit(process, full=True)
        await asyncio.sleep(fault.seconds)
        self._network.limit(process, full=False)

    def _process(self, name: str) -> str:
        slot, _, is_far = name.partition("/")
        if slot in self._workers:
            life = self._workers[slot].life
            if life is not None and is_far and life.far is not None:
                return life.far.process.name
            return life.process.name if life is not None else slot
        return self._routers[name].process.name if name in self._routers else name

    # ---- Redis and clocks ----

    async def _redis_stalls(self, fault: Fault) -> None:
        self._redis.stall(fault.seconds)
        await asyncio.sleep(fault.seconds)

    async def _redis_flushed(self, fault: Fault) -> None:
        self._redis.store.flush()

    async def _redis_restarts(self, fault: Fault) -> None:
        self._redis.stop()
        await self._at_most(fault, 1.0, 0.0, lambda level: None if level else self._redis.start_empty())

    async def _redis_forgets(self, fault: Fault) -> None:
        """Restores Redis to its state of ``fault.seconds`` ago, as when a replica that lagged takes over."""
        before = self._redis.store.snapshot()
        await asyncio.sleep(fault.seconds)
        self._redis.stop()
        self._redis.store.restore(before)
        self._redis.listen()

    async def _clock_jumps(self, fault: Fault) -> None:
        self._redis.epoch += self._rng.choice((-1.0, 1.0)) * fault.factor
        await asyncio.sleep(0)

    async def _index_lies(self, fault: Fault) -> None:
        """Adds and removes random blocks in the sets of the prefix index, every LIE_EVERY_S for
        ``fault.seconds``.
        """
        until = asyncio.get_running_loop().time() + fault.seconds
        while asyncio.get_running_loop().time() < until:
            sets = [members for key, members in self._redis.store.values.items() if b":prefix:" in key]
            blocks = sorted({block for members in sets for block in members if block[:11] != b"incarnation"})
            for members in sets:
                for block in self._rng.sample(blocks, min(len(blocks), 4)):
                    if self._rng.random() < 0.5:
                        members[block] = None
                    else:
                        members.pop(block, None)
            await asyncio.sleep(LIE_EVERY_S)

    async def _roster_lies(self, fault: Fault) -> None:
        """Has the worker's entry name a life that never was, after each heartbeat for ``fault.seconds``."""
        until, key = asyncio.get_running_loop().time() + fault.seconds, entry_prefix(NAMESPACE) + fault.target
        while asyncio.get_running_loop().time() < until:
            entry = self._redis.store.values.get(key.encode())
            if entry is not None:
                info = msgspec.msgpack.decode(entry[b"info"], type=WorkerInfo)
                lie = msgspec.structs.replace(info, incarnation=f"{fault.target}-0")
                entry[b"info"] = msgspec.msgpack.encode(lie)
            await asyncio.sleep(LIE_EVERY_S)

    async def _wall_jumps(self, fault: Fault) -> None:
        """Sets the wall clock of the target's process ``fault.factor`` seconds ahead, for ``fault.seconds``."""
        of = self._workers.get(fault.target) or self._routers[fault.target]
        of.wall_ahead_s += fault.factor
        await asyncio.sleep(fault.seconds)
        of.wall_ahead_s -= fault.factor

    async def _drift(self, fault: Fault) -> None:
        """Has the monotonic clock of the target's machine run fast (``fault.factor`` above 0) or slow, by so many
        thousandths, for ``fault.seconds``; what it gained or lost stays.
        """
        of = self._workers.get(fault.target) or self._routers[fault.target]
        of.clock.drift(1.0 + fault.factor / 1000)
        await asyncio.sleep(fault.seconds)
        of.clock.drift(1.0)

    # ---- tiers ----

    async def _tier_slow(self, fault: Fault) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SeededLoop)
        slow = max(0.05, fault.factor / 20)
        await self._at_most(
            msgspec.structs.replace(fault, target=""),  # the loop's threads are everybody's
            slow,
            SeededLoop.thread_s,
            lambda level: setattr(loop, "thread_s", level),
        )

    async def _tier_fails(self, fault: Fault) -> None:
        health = self._workers[fault.target].tier_health
        await self._at_most(fault, 1.0, 0.0, lambda level: setattr(health, "fails", level > 0))

    # ---- operators ----

    async def _leave(self, fault: Fault) -> None:
        worker = self._workers[fault.target]
        if worker.life is not None:
            worker.life.stop.set()
        await asyncio.sleep(0)

    async def _weights(self, fault: Fault) -> None:
        """Has the worker drain, or be killed, and return with other weights under the same model name, or another
        kind of KV, as in a rolling upgrade.
        """
        self._workers[fault.target].upgrade()
        if fault.factor == ABRUPT:
            self._workers[fault.target].kill()
        else:
            await self._leave(fault)

    # ---- tasks ----

    async def _cancel_again(self, fault: Fault) -> None:
        """For ``fault.seconds``, has tasks that are cancelled be cancelled a second time soon after, amid their
        clean-up.
        """
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SeededLoop)
        everybody, within = msgspec.structs.replace(fault, target=""), 0.002 * fault.factor / 10
        await self._at_most(everybody, within, 0.0, lambda level: setattr(loop, "again_s", level))
