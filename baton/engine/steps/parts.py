"""Holds the parts that an engine's loop works with, whatever its role. Torch-free.

Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from baton.engine.abilities import freed_of, mirror_of
from baton.engine.adapters.table import AdapterTable
from baton.engine.grammar.running import Grammars
from baton.engine.plan import Runner
from baton.engine.states import StateRules
from baton.engine.steps.sharing import PageSharing
from baton.kernels.abi.cores import LentCores
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch


class LoopChannel(Protocol):
    """Is a loop's end of the local channel to the I/O process (worker/channel.py)."""

    def send(self, message: ch.ToIo) -> None:
        """Queues a message and never blocks."""

    def poll(self, timeout_s: float) -> list[ch.ToEngine]:
        """Returns the messages that have come, waiting up to ``timeout_s`` seconds for the first.

        Raises EOFError when the peer is gone.
        """


class EngineParts(NamedTuple):
    """Holds what a loop works with, whatever its role; the loop of another role takes it over.

    ``memory`` is the pages' bytes, for a role that copies pages itself; ``rules`` say how recurrent state is kept,
    None for models without; ``cores`` is told when there is nothing to run.
    """

    runner: Runner
    pool: PagePool
    channel: LoopChannel
    clock: Callable[[], float]  # monotonic seconds
    grammars: Grammars
    sharing: PageSharing
    memory: memoryview | None
    adapters: AdapterTable
    rules: StateRules | None = None
    cores: LentCores = LentCores()

    @classmethod
    def around(
        cls,
        runner: Runner,
        pool: PagePool,
        channel: LoopChannel,
        clock: Callable[[], float],
        grammars: Grammars | None = None,
        memory: memoryview | None = None,
        state_every: int = 0,
        adapters: AdapterTable | None = None,
        cores: LentCores = LentCores(),
    ) -> EngineParts:
        """Returns the parts of an engine that starts: no page is shared yet, grammars are the runner's by default.

        ``state_every`` is the number of blocks between two checkpoints of recurrent state; 0 lets ``StateRules``
        choose.
        """
        rules, followed = StateRules.of(runner.spec.layout, state_every), grammars or Grammars(runner.spec)
        held = adapters or AdapterTable()
        mirror = mirror_of(runner)
        sharing = PageSharing(pool, mirror)
        if mirror is not None:
            pool.taken = mirror.taken
            pool.supply.freed = freed_of(mirror)
        return cls(runner, pool, channel, clock, followed, sharing, memory, held, rules, cores)
