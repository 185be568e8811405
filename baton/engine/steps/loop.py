"""Runs the loop that both engine roles share: take messages, run a step, report. Torch-free.

Knows nothing of prefill or decode; waits only in ``channel.poll``, and only when there is nothing to run.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec

from baton.cost.fit import StepFit
from baton.engine.abilities import mirror_of, ranks_of
from baton.engine.adapters.table import Answer
from baton.engine.grammar.running import COMPILE_WAIT_S
from baton.engine.plan import StepPlan
from baton.engine.sequence import SequenceState
from baton.engine.steps.expert_load import ExpertMeter
from baton.engine.steps.handlers import Handlers, Table
from baton.engine.steps.isolate import StepOutcome, run_isolated
from baton.engine.steps.log import StepLog
from baton.engine.steps.parts import EngineParts
from baton.protos import channel as ch
from baton.protos.errors import BatonError, RankLost
from baton.protos.measurements import StepSample
from baton.protos.nouns import EngineRequest, PoolSnapshot

log = logging.getLogger("baton.engine")

REPORT_EVERY_S = 0.1  # seconds between two reports, because readers look a few times a second
ADAPTERS_SHARE = 0.02  # of a step's time, which pieces of adapters may take after it, because others wait meanwhile
IDLE_WAIT_S = 5.0  # seconds that an idle loop sleeps at most; a message wakes it
READ_WAIT_S = 0.005  # seconds between two looks at an adapter that is being read, which takes some tenths
NO_REQUEST = -1  # the key of no request, for messages without one: requests' keys begin at 1


class StepLoop(ABC):
    """Is the base of both roles' loops: a role adds ``beat``, ``patience``, its messages' ``handlers`` and its
    counts.
    """

    role: ClassVar[str]

    def __init__(self, parts: EngineParts):
        self.parts = parts
        self.spec = parts.runner.spec
        self.pool, self.channel, self.clock = parts.pool, parts.channel, parts.clock
        self.log = StepLog()
        self._fit = StepFit()
        self.mirror = mirror_of(parts.runner)
        self._experts = ExpertMeter(ranks_of(parts.runner))
        self.draining = False  # no new requests are admitted
        self.leaving = False  # the loop ends after this turn
        self.next_role = ""  # the role that the process takes once this loop is empty
        self._reported_at = float("-inf")
        self._step_s = 0.0  # seconds that the last step took
        self._unreported = True
        self._reported: tuple[object, ...] = ()  # the counts at the last report
        self._handlers = self.handlers()

    # ---- what a role adds ----

    @abstractmethod
    def handlers(self) -> Table:
        """Returns the handler of each message type that an engine of this role receives."""

    @abstractmethod
    def beat(self) -> bool:
        """Runs one step if there is one; returns False if there is nothing to compute now."""

    def patience(self) -> float:
        """Returns the seconds that an idle loop may sleep before it must look at the clock again."""
        return IDLE_WAIT_S

    @abstractmethod
    def fail(self, key: int, error: Exception) -> None:
        """Ends the request ``key`` with ``error``; all others go on."""

    @abstractmethod
    def load(self) -> tuple[int, int, int]:
        """Returns the numbers of running sequences, of waiting ones, and of waiting prompt tokens."""

    def extras(self) -> dict[str, int]:
        """Returns the figures that only this role counts, by field of ``Stats``."""
        return {}

    @property
    def reserved(self) -> int:
        """Returns the number of available pages that are not to be shared with the I/O process, because what runs
        will need them.
        """
        return 0

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Returns whether no request is left and no page is leased except by the cache or by shares with the I/O
        process.
        """

    # ---- the beat ----

    def run(self) -> None:
        """Runs until Shutdown comes or the I/O process is gone; once ``next_role`` is set, until no request is
        left.
        """
        busy = False
        while not self.leaving and not (self.next_role and self.empty):
            try:
                messages = self.channel.poll(0.0 if busy else self.wait_s())
            except EOFError:
                return
            busy = self.turn(messages)
            if not busy:
                self.parts.cores.rest()

    def wait_s(self) -> float:
        """Returns the seconds that an idle loop waits for messages before its next turn."""
        if self.parts.grammars.awaited:
            return COMPILE_WAIT_S
        if self.parts.adapters.holding:
            return 0.0
        if self.parts.adapters.reading:
            return READ_WAIT_S
        return max(0.0, min(self.patience(), self._until_report()))

    def sequence(self, key: int, request: EngineRequest) -> SequenceState:
        """Returns a new sequence for ``request``, which came as ``key``; its grammar begins to compile, and its
        adapter stays loaded until ``parts.adapters.release(key)``.
        """
        self.parts.adapters.use(key, request.adapter_id)
        grammar = self.parts.grammars.begin(request)
        return SequenceState(key, request, self.spec.eos_token_ids, self.spec.max_model_len, grammar)

    def turn(self, messages: list[ch.ToEngine]) -> bool:
        """Handles ``messages``, runs a step and reports; returns True while there may be more to compute."""
        self.parts.grammars.turn()
        self._take_adapters()
        for message in messages:
            self.take(message)
        busy = self.beat()
        self.tell_evicted()
        if idle := self.pool.drain_idle():
            self.channel.send(ch.CacheIdle(idle))  # at once: a page that is evicted before it is copied is lost
        self._unreported = self._unreported or busy or any(type(one) is not ch.AskSnapshot for one in messages)
        if self._until_report() <= 0:
            self._report()
        return busy

    def take(self, message: ch.ToEngine) -> None:
        """Handles one message from the I/O process. A handler that raises fails its own request, never the loop.

        Raises RankLost, because an engine whose ranks disagree on what they hold can't go on.
        """
        try:
            self._handlers[type(message)](message)
        except RankLost:
            raise
        except Exception as error:
            note(error, f"a {type(message).__name__} could not be handled")
            self.fail(getattr(message, "key", NO_REQUEST), error)

    def compute(self, plan: StepPlan) -> StepOutcome:
        """Runs and logs the step ``plan``; the outcome lists the sequences that failed, which leave the others
        unharmed.
        """
        outcome = run_isolated(self.parts.runner, plan)
        self.note_step(plan, outcome)
        return outcome

    def note_step(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """Logs the step ``plan`` and the sequences that failed in it."""
        self._step_s = outcome.seconds
        self.log.note(plan.shape(outcome.seconds, self.parts.adapters.rank_of))
        for seq, error in outcome.failed.items():
            note(error, f"sequence {seq} could not be computed")

    # ---- messages of both roles ----

    def shared_handlers(self) -> Handlers:
        """Returns the handlers of the messages that engines of both roles receive, to which a role adds its own."""
        return (
            Handlers()
            .on(ch.AskSnapshot, self._count_pool)
            .on(ch.Drain, self._drain)
            .on(ch.Shutdown, self._shut_down)
            .on(ch.SetRole, self._set_role)
            .on(ch.Pin, self._pin)
            .on(ch.Unpin, self.parts.sharing.unpin)
            .on(ch.Keep, self._keep)
            .on(ch.Unkeep, self.parts.sharing.unkeep)
            .on(ch.Fill, self._fill)
            .on(ch.Filled, self.parts.sharing.filled)
            .on(ch.LoadAdapter, self._load_adapter)
            .on(ch.UnloadAdapter, self._unload_adapter)
            .on(ch.ListAdapters, self._list_adapters)
        )

    def _drain(self, message: ch.Drain) -> None:
        self.draining = True

    def _shut_down(self, message: ch.Shutdown) -> None:
        self.leaving = True
        self.next_role = ""

    def _set_role(self, message: ch.SetRole) -> None:
        self.draining, self.next_role = True, message.role

    def _count_pool(self, message: ch.AskSnapshot) -> None:
        found = self.snapshot()
        self._unreported = self._unreported or self._counts() != self._reported  # leases may have run out
        self.channel.send(ch.SnapshotIs(message.ticket, found))

    def _pin(self, message: ch.Pin) -> None:
        self.channel.send(self.parts.sharing.pin(message, lambda: self.reserved))

    def _keep(self, message: ch.Keep) -> None:
        self.channel.send(self.parts.sharing.keep(message))

    def _fill(self, message: ch.Fill) -> None:
        self.channel.send(self.parts.sharing.fill(message, lambda: self.reserved))

    def _load_adapter(self, message: ch.LoadAdapter) -> None:
        self._tell_adapters(self.parts.adapters.load(message))

    def _unload_adapter(self, message: ch.UnloadAdapter) -> None:
        self._tell_adapters(self.parts.adapters.unload(message))

    def _list_adapters(self, message: ch.ListAdapters) -> None:
        self.channel.send(self.parts.adapters.listed(message))

    def _take_adapters(self) -> None:
        """Takes a piece of an adapter that was read, and more for a small share of the last step's time: after long
        steps, one piece each would take minutes.
        """
        until = self.clock() + ADAPTERS_SHARE * self._step_s
        while self.parts.adapters.reading:
            self._tell_adapters(self.parts.adapters.turn())
            if not self.parts.adapters.holding or self.clock() >= until:
                return

    def _tell_adapters(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            self.channel.send(answer)

    def succeed(self, earlier: StepLoop, stays: ch.RoleIs | None = None) -> None:
        """Takes over from ``earlier``, a loop with the same parts: cache and open shares stay; announces the new
        role, or by ``stays`` that it is the former one.
        """
        assert earlier.parts is self.parts, "weights, pages and cached blocks stay where they are"
        self.channel.send(stays or ch.RoleIs(earlier.next_role))
        if self.parts.adapters.applies:
            self.channel.send(self.parts.adapters.announced())

    def snapshot(self) -> PoolSnapshot:
        """Returns the current counts of pages by state, of sequences by state, and of steps."""
        counts = self.pool.snapshot_counts()
        running, waiting, _ = self.load()
        return PoolSnapshot(
            **counts._asdict(),
            leases_swept=self.extras().get("leases_swept", 0),
            running=running,
            waiting=waiting,
            step_seconds_p50=self.log.seconds_p50,
            steps=self.log.steps,
        )

    def _counts(self) -> tuple[object, ...]:
        """Returns what may change without a message or a step."""
        return (self.pool.snapshot_counts(), *self.load(), self.extras().get("leases_swept", 0))

    # ---- reports ----

    def _until_report(self) -> float:
        return self._reported_at + REPORT_EVERY_S - self.clock() if self._unreported else IDLE_WAIT_S

    def _report(self) -> None:
        self._reported_at, self._unreported = self.clock(), False
        self._tell_cache()
        stats = self._stats()
        self._reported = self._counts()
        self.channel.send(stats)
        self._price(stats.samples)

    def tell_evicted(self) -> None:
        """Tells the I/O process at once which blocks were evicted, where lower tiers may have them: it lifts none
        that it believes on the device, so that their prompt would be computed again.
        """
        if self.pool.has_evicted:
            self._tell_cache()

    def _tell_cache(self) -> None:
        added, removed = self.pool.drain_changes()
        if added or removed:
            self.channel.send(ch.CacheChanged(tuple(added), tuple(removed)))

    def _price(self, samples: Sequence[StepSample]) -> None:
        """Updates the cache's estimate of the cost of recomputing its blocks, from the steps that computed
        prompts.
        """
        read = [sample for sample in samples if sample.prefill_tokens]
        for sample in read:
            self._fit.observe(sample)
        if read and (curve := self._fit.curve) is not None:
            self.pool.priced(curve.prefill_token, curve.prefill_pair)

    def _stats(self) -> ch.Stats:
        counts = self.pool.snapshot_counts()
        running, waiting, waiting_tokens = self.load()
        found = ch.Stats(
            step=self.log.steps,
            running=running,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            free_pages=counts.free,
            cached_pages=counts.cached,
            leased_pages=counts.leased,
            tokens_prefilled=self.log.tokens_prefilled,
            tokens_decoded=self.log.tokens_decoded,
            step_seconds_p50=self.log.seconds_p50,
            samples=self.log.take_samples(),
            busy_seconds=self.log.busy_seconds,
            prefill_pairs=self.log.prefill_pairs,
            decode_context=self.log.decode_context,
            preemptions=0,
            leases_swept=0,
            prefix_hit_tokens=0,
            prefix_asked_tokens=0,
            expert_load=self._experts.load(),
        )
        return msgspec.structs.replace(found, **self.extras())


def note(error: Exception, what: str) -> None:
    """Logs ``error`` with its traceback unless it is a BatonError, a refusal of which the request itself hears."""
    if not isinstance(error, BatonError):
        log.error("%s", what, exc_info=error)
