"""The decode engine's loop where a device computes a step while the next one is planned. Torch-free.

Knows nothing of devices. In a beat it plans the step behind the one that runs and submits it, waits for the results
of the first and tells them. So while the device computes, the results of the step before are taken and sent,
messages are handled and the next step is planned; results are looked at one step late.

    device   | step n            | step n+1          | step n+2
    host     | n-1's results, messages, plan n+1 | n's results, messages, plan n+2 | …

A row of n+1 whose sequence ended with n is thrown away. What such a sequence holds stays its own until the step in
flight has ended: pages that a step still writes must not become somebody else's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from baton.decode_worker.engine.following import following
from baton.decode_worker.engine.job import DecodeJob
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.abilities import AsyncSteps
from baton.engine.plan import SequenceStep, StepPlan
from baton.engine.steps.isolate import StepOutcome, outcome_of, run_isolated
from baton.engine.steps.parts import EngineParts
from baton.protos.errors import RankLost

log = logging.getLogger("baton.engine")


class StepInFlight(NamedTuple):
    """A step that was submitted and whose results aren't known yet."""

    plan: StepPlan
    seqs: frozenset[int]
    fed: frozenset[int] = frozenset()  # the sequences whose tokens the step before chose


class AsyncDecodeLoop(DecodeLoop):
    """The loop of a decode worker whose runner has asynchronous ``steps``.

    It drafts nothing, because drafts follow a token that the host has seen. Nor does it hold steps apart: no core
    is lent where a device computes.
    """

    def __init__(
        self, parts: EngineParts, limits: DecodeLimits, entropy: Callable[[int], bytes], steps: AsyncSteps
    ):
        super().__init__(parts, limits, entropy)
        self._steps = steps
        self._flight: StepInFlight | None = None
        self._held: list[tuple[int, DecodeJob]] = []  # have ended, and have rows in the step in flight
        self._steps_ahead = self._rows_discarded = 0

    def run(self) -> None:
        """Runs as ``StepLoop.run``, and returns when no step is in flight."""
        try:
            super().run()
        finally:
            self._drop()

    def beat(self) -> bool:
        """Submits the step behind the one in flight, if it can be planned; waits for that one and sends its tokens.

        Returns False if there was nothing to do.
        """
        self._sweep()
        self._end_late()
        flight = self._flight
        plan = self.scheduler.plan() if flight is None else flight.plan
        if not plan.items:
            starved = self._fail_starved()
            self._tell()
            return starved
        self.starvation.clear()
        flight = self._flight = flight or self._submitted(plan)
        behind = None if flight is None else self._submitted_behind(flight)
        outcome, behind = self._landed(plan, flight, behind)
        self._take_outcome(plan, outcome, behind)
        self._tell()
        return True

    # ---- steps in flight ----

    def _submitted(self, plan: StepPlan, fed: frozenset[int] = frozenset()) -> StepInFlight | None:
        """Submits a step; returns None if that fails, for whose sake isn't known then."""
        try:
            self._steps.submit(plan, fed)
        except RankLost:
            raise
        except Exception as error:
            log.warning("a step was not submitted, it is run at once: %s", error)
            return None
        return StepInFlight(plan, frozenset([item.seq for item in plan.items]), fed)

    def _submitted_behind(self, flight: StepInFlight) -> StepInFlight | None:
        found = following(self.scheduler, flight.plan)
        return None if found is None else self._submitted(*found)

    def _landed(
        self, plan: StepPlan, flight: StepInFlight | None, behind: StepInFlight | None
    ) -> tuple[StepOutcome, StepInFlight | None]:
        """Returns the results of the step ``plan``, and the step in flight behind it.

        If it failed, or was not submitted, it is run again by halves. The step behind it, which took its tokens, is
        dropped first.
        """
        if flight is not None:
            try:
                return outcome_of(plan, self._steps.collect()), behind
            except RankLost:
                raise
            except Exception as error:
                log.warning("a step failed, it is run again: %s", error)
            if behind is not None:
                self._discard()
        known = StepPlan(tuple([self._known(item) for item in plan.items if item.seq in self.requests]))
        return run_isolated(self.parts.runner, known) if known.items else StepOutcome({}, {}, 0.0), None

    def _known(self, item: SequenceStep) -> SequenceStep:
        """Returns ``item`` with its tokens, those that it was fed included: the step that chose them has landed."""
        tokens = self.requests[item.seq].job.sequence.tokens
        return msgspec.structs.replace(item, tokens=tokens[item.start : item.start + len(item.tokens)])

    def _discard(self) -> None:
        """Waits for the oldest step in flight, whose results nobody wants."""
        with suppress(Exception):
            self._steps.collect()

    def _drop(self) -> None:
        if self._flight is not None:
            self._discard()
        self._fly(None)

    def _fly(self, behind: StepInFlight | None) -> None:
        """Makes ``behind`` the step in flight, the one before it having landed, and frees what was held for that
        one.
        """
        self._steps_ahead += behind is not None
        held, self._held, self._flight = self._held, [], behind
        for key, job in held:
            super()._let_go(key, job)

    def _take_outcome(self, plan: StepPlan, outcome: StepOutcome, behind: StepInFlight | None) -> None:
        """Takes a step's results for the sequences that go on, and throws away those of the others."""
        self._fly(behind)
        self.note_step(plan, outcome)
        self._observe(plan.shape(outcome.seconds))
        items = [item for item in plan.items if item.seq in self.requests]
        if len(items) < len(plan.items):
            gone = [item for item in plan.items if item.seq not in self.requests]
            self._rows_discarded += sum(len(item.tokens) for item in gone)
            self.log.note_discarded(StepPlan(tuple(gone)).shape())
            outcome.sampled = {key: found for key, found in outcome.sampled.items() if key in self.requests}
        self._learn(items, outcome)

    # ---- ends ----

    def _let_go(self, key: int, job: DecodeJob) -> None:
        if self._flight is not None and key in self._flight.seqs:
            self.scheduler.drop(job)
            self._held.append((key, job))
        else:
            super()._let_go(key, job)

    # ---- counts ----

    @property
    def empty(self) -> bool:
        """Returns whether no answer is being generated, no stream may write a page and no step is in flight."""
        return self._flight is None and super().empty

    def extras(self) -> dict[str, int]:
        """Returns the counts of a decode worker, and those of steps planned ahead and rows thrown away."""
        ahead = {"steps_ahead": self._steps_ahead, "rows_discarded": self._rows_discarded}
        return super().extras() | ahead
