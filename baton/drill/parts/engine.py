"""A simulated engine process: the product's loops, schedulers, pool and leases around the paced runner.

In each turn it takes the messages that have come, runs one turn of its loop, and sends the results once the step's
time has passed. Messages produced before the step was computed may be sent at once, as a real engine does.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator
from typing import cast

from baton.decode_worker.engine.async_loop import AsyncDecodeLoop
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.drill.checks.pace import PaceWitness
from baton.drill.checks.watch import EngineWitness
from baton.drill.language.grammar import GrammarDelays, SimulatedGrammars
from baton.drill.language.oracle import EOS, MOST_TOKENS, VOCABULARY
from baton.drill.loop import seeded_loop
from baton.drill.machines.clock import MachineClock
from baton.drill.machines.cores import MachineCores
from baton.drill.machines.memory import Memory
from baton.drill.machines.process import Process
from baton.drill.models.float_pages import FloatRunner
from baton.drill.models.host_pages import HostsRunner
from baton.drill.models.late_steps import LateSteps
from baton.drill.models.pages import PagedRunner
from baton.drill.models.runner import SimulatedRunner, Timing
from baton.drill.models.selected_pages import SelectedRunner
from baton.drill.parts.adapters import LIMITS, MOST_BYTES, MOST_RANK, SimulatedFiles
from baton.drill.parts.drafts import drafter
from baton.drill.scenario import PageKind, Scenario
from baton.engine.adapters.table import AdapterTable
from baton.engine.backends.paced.adapters import PacedAdapters
from baton.engine.grammar.running import Grammars
from baton.engine.plan import ModelSpec, Runner
from baton.engine.steps.loop import StepLoop
from baton.engine.steps.parts import EngineParts
from baton.engine.steps.succession import succession
from baton.engine.wide_pages import widened
from baton.kernels.abi.cores import LentCores
from baton.kv.layout.tables import MARK, table_count
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.process.effort import Effort, Efforts
from baton.protos.channel import EngineReady, ToEngine, ToIo
from baton.protos.errors import ConfigError
from baton.protos.measurements import StepSample

MODEL_ID = "m"


def model_id_of(model: int) -> str:
    """Returns the id of the scenario's model number ``model``."""
    return f"{MODEL_ID}{model}" if model else MODEL_ID


CANT_BEGIN = "can't begin here"  # how an engine says that it keeps its role
LEAST_WAIT_S = 0.001  # seconds that an idle engine waits at least
SPIN_S = 0.001  # seconds of a turn that computes nothing and says that there may be more to do
AT_ONCE = 0.5  # share of the turns whose first words are told before the step's end
CHECK_EVERY = 8  # turns between two checks of the whole pool


class ChannelEnd:
    """The I/O process's end of the message channel to an engine; iterating yields the engine's messages."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._heard: deque[ToIo] = deque()
        self._news = asyncio.Event()
        self._ended = False

    def send(self, message: ToEngine) -> None:
        """Sends ``message`` to the engine; drops it if the engine has ended."""
        if not self._ended:
            self._engine.take(message)

    def told(self, message: ToIo) -> None:
        """Receives a message from the engine."""
        self._heard.append(message)
        self._news.set()

    def end(self) -> None:
        """Ends the iteration over the engine's messages, because the engine has ended."""
        self._ended = True
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[ToIo]:
        while True:
            while self._heard:
                yield self._heard.popleft()
            if self._ended:
                return
            self._news.clear()
            await self._news.wait()


class SimulatedPace:
    """The pace of the engines of a worker slot: steps take ``slow`` times as long as ``model`` times a step of the
    scenario, and none begins before ``stuck_until``. With ``keeps_role`` they can't begin another role.
    """

    def __init__(self, model: float = 1.0, keeps_role: bool = False) -> None:
        self.slow, self.stuck_until = 1.0, 0.0
        self.model, self.keeps_role = model, keeps_role


class SimulatedEngine:
    """A simulated engine, from its start to its end; it plays one role after another with the same pages."""

    def __init__(
        self,
        name: str,
        role: str,
        scenario: Scenario,
        pace: SimulatedPace,
        rng: random.Random,
        witness: EngineWitness,
        weights: int,
        adapters: SimulatedFiles | None = None,
        clock: MachineClock | None = None,
        host_memory: Memory | None = None,
        kind: PageKind = PageKind(),
        hosts: int = 1,
        cores: MachineCores | None = None,
    ) -> None:
        self._seat = None if cores is None else cores.join()
        self._paces: PaceWitness | None = None
        if self._seat is not None:
            self._paces = PaceWitness(f"{name} engine", self._seat, scenario.pace_s, witness.violated)
        self._host_memory = host_memory
        clock = clock or MachineClock()
        self.process, self.channel = Process(f"{name} engine", clock), ChannelEnd(self)
        self._scenario, self._pace, self._rng, self.witness = scenario, pace, rng, witness
        self._now, self._true_time = clock.now, seeded_loop().true_time
        self._stood = False  # whether it had to stand still since its last turn
        self._worked = 0.0  # seconds of the steps that are over
        self._step_began: float | None = None
        self.died_at = math.inf  # by the loop's clock
        self._ahead = 0.0  # seconds of the present step, which the loop's time has yet to pass
        held = PacedAdapters(MOST_RANK, MOST_BYTES) if adapters else None
        self.far: PageMemory | None = None  # the pages of the other host of its ranks
        runner = self._runner(f"drill {weights}", kind, held, hosts)
        layout, witness.weights = runner.spec.layout, _weights(runner.spec)
        pages = scenario.pages * table_count(layout) // layout.runs
        self.memory = PageMemory.create(pages, layout.page_bytes)
        runner.bind(self.memory.view(), pages)
        if isinstance(runner, HostsRunner):
            self.far = runner.far
        self.ready = EngineReady(
            layout, runner.spec.fingerprint, MOST_TOKENS, VOCABULARY, (EOS,), pages, scenario.max_batch
        )
        self.pool = PagePool(pages, layout.block_tokens)
        if scenario.tier_pages or scenario.disk_pages:
            self.pool.watch_idle()
        grammars = cast(Grammars, SimulatedGrammars(GrammarDelays(self._now, rng)))
        memory = self.memory.view() if scenario.swap else None
        table = AdapterTable(held, LIMITS, adapters.start) if adapters else None
        lent = LentCores() if self._seat is None else self._seat.lent
        self._parts = EngineParts.around(
            runner, self.pool, self, self._now, grammars, memory, adapters=table, cores=lent
        )
        self.loop = self._made(role)
        self.role = role
        self._inbox: list[ToEngine] = []
        self._outbox: list[ToIo] = []
        self._before_step: int | None = None
        self._news = asyncio.Event()
        self.turns = 0

    def _runner(self, name: str, kind: PageKind, adapters: PacedAdapters | None, hosts: int) -> Runner:
        """Returns the runner: the paced engine's, or one over pages of ``kind`` where they aren't plain ones, or of
        ranks on ``hosts`` hosts.
        """
        sight = self._scenario.sight
        timing = Timing(self._cost, self._pass, lambda: self._now() + self._ahead)
        if sight.divided:
            return HostsRunner(name, hosts > 1, timing, adapters)
        if kind.dtype:
            floats = FloatRunner(name, kind, self.witness.violated, timing, adapters)
            return widened(floats, kind.block_tokens)
        if sight.selected:
            return SelectedRunner(name, sight.selected, timing, adapters)
        if sight.window or self._scenario.page_kinds:
            return widened(PagedRunner(name, sight, kind.own, timing, adapters), kind.block_tokens)
        return SimulatedRunner(name, timing, adapters)

    def start(self) -> None:
        """Starts the engine's loop as a task."""
        self.process.spawn(self._run(), "loop")

    def kill(self) -> None:
        """Ends the engine abruptly; the I/O side's iteration over its messages ends."""
        self.died_at = min(self.died_at, asyncio.get_running_loop().time())
        self.process.kill()
        self.channel.end()
        if self._seat is not None:
            self._seat.leave()

    def close(self) -> None:
        """Frees the engine's memory."""
        self.memory.close()
        if self.far is not None:
            self.far.close()

    def efforts(self) -> Efforts:
        """Returns the seconds that the engine's only thread has spent in steps."""
        present = 0.0 if self._step_began is None else self._now() - self._step_began
        return {0: Effort(self._worked + present, 0.0)}

    def obituary(self) -> str:
        """Returns how the engine ended, in words."""
        return "killed"

    def send(self, message: ToIo) -> None:
        """Queues a message of the loop to the I/O side, which receives it when the step is over."""
        self._outbox.append(message)

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """Always raises AssertionError: a simulated engine waits for messages itself."""
        raise AssertionError("the simulated engine doesn't poll")

    def take(self, message: ToEngine) -> None:
        """Receives a message from the I/O side; drops it if the engine has ended."""
        if self.process.alive:
            self.witness.told(message, self._now(), self._true_time())
            self._inbox.append(message)
            self._news.set()

    # ---- turns ----

    async def _run(self) -> None:
        while not self.loop.leaving:
            await self._until_unstuck()
            messages, self._inbox = self._inbox, []
            busy, computed = self._turn(messages)
            if computed:
                if self._before_step is not None and self._rng.random() < AT_ONCE:
                    self._tell(self._before_step)
                await self._compute()
            elif busy:
                await asyncio.sleep(SPIN_S)
            self._tell(len(self._outbox))
            if not busy:
                self._parts.cores.rest()
            if self.loop.next_role and self.loop.empty:
                self._succeed()
            elif not busy and not self._inbox:
                await self._wait()
        self.channel.end()

    async def _compute(self) -> None:
        """Passes the duration of the present step."""
        took, self._ahead = self._ahead, 0.0
        self._step_began = self._now()
        await asyncio.sleep(took)
        self._worked, self._step_began = self._worked + took, None
        if self._seat is not None:
            self._seat.end()

    def _turn(self, messages: list[ToEngine]) -> tuple[bool, int]:
        """Runs one turn of the loop; returns whether there may be more to compute, and the number of computed
        tokens.
        """
        log, self._before_step = self.loop.log, None
        before = log.tokens_prefilled + log.tokens_decoded
        swept = self.loop.extras().get("leases_swept", 0)
        busy = self.loop.turn(messages)
        self.turns += 1
        if self._paces is not None and isinstance(self.loop, DecodeLoop):
            self._paces.turned(self.loop, self._now(), self._stood)
            self._stood = False
        if self.turns % CHECK_EVERY == 0:
            self.pool.check()
        newly = self.loop.extras().get("leases_swept", 0) - swept
        self.witness.turned(newly, self._outbox, self._now(), self._true_time())
        return busy, log.tokens_prefilled + log.tokens_decoded - before

    def _cost(self, sample: StepSample) -> float:
        """Returns a step's duration in seconds, and marks which messages were queued before the step. Raises
        MemoryError if the engine is short of memory.
        """
        if self._host_memory is not None:
            self._host_memory.allocate(self.process.name)
        self._before_step = len(self._outbox)
        if self._paces is not None and isinstance(self.loop, DecodeLoop):
            self._paces.begins(self.loop, self._now())
        cores = 1.0 if self._seat is None else self._seat.begin()
        tokens = sample.prefill_tokens + sample.decode_sequences + sample.draft_tokens
        return (
            (self._scenario.step_s + tokens * self._scenario.token_s) * self._pace.model * self._pace.slow / cores
        )

    def _pass(self, seconds: float) -> None:
        """Adds ``seconds`` to the time that the loop passes once the turn is over."""
        self._ahead += seconds

    def _tell(self, count: int) -> None:
        said, self._outbox = self._outbox[:count], self._outbox[count:]
        for message in said:
            self.channel.told(message)

    def _succeed(self) -> None:
        """Continues in the role that was requested, as ``worker.engine_main`` does."""
        self.loop = succession(self.loop, self._begun)
        self.role = self.loop.role

    def _begun(self, role: str) -> StepLoop:
        if role != self.role and self._pace.keeps_role:
            raise ConfigError(f"a {role} worker {CANT_BEGIN}", "worker.speculation")
        return self._made(role)

    def _made(self, role: str) -> StepLoop:
        own = self._scenario
        self._parts.cores.begin_role(role)
        if role == "prefill":
            return PrefillLoop(self._parts, own.chunk_tokens, own.max_batch)
        limits = DecodeLimits(own.max_batch, own.chunk_tokens, own.lease_ttl_s, pace_s=own.pace_s)
        drafts = drafter(self._rng, own.drafts_right, self._now, own.sight)
        if own.steps_ahead and drafts is None:
            return AsyncDecodeLoop(self._parts, limits, self._rng.randbytes, LateSteps(self._parts.runner))
        return DecodeLoop(self._parts, limits, self._rng.randbytes, drafts)

    # ---- time ----

    async def _until_unstuck(self) -> None:
        while (left := self._pace.stuck_until - self._true_time()) > 0:
            self._stood = True
            await asyncio.sleep(left)

    async def _wait(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(max(LEAST_WAIT_S, self.loop.wait_s())):
                await self._news.wait()
        except TimeoutError:
            return


def _weights(spec: ModelSpec) -> str:
    """Returns what an answer may not change between: the weights, and how exact KV is, however pages divide it."""
    return f"{spec.fingerprint} {spec.layout.fidelity.removesuffix(MARK)}"
