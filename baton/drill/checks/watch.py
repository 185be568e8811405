"""Watches the messages to and from one simulated engine for violations: changed requests, leases ended too early.

Knows nothing of pools or of how an engine works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from baton.drill.checks.keys import salt_of
from baton.drill.checks.queues import QueueWitness
from baton.drill.language.grammar import alike
from baton.drill.scenario import Phase, Request
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest
from baton.router.api.batch.lane import LOWEST_PRIORITY

Violated = Callable[[str], None]
Answers = dict[tuple[str, int], str]  # the weights that began an answer, by request id and choice
Departed = dict[tuple[int, int], float]  # when nobody waits any more for an answer, by request and choice
TELLS_PROGRESS = (ch.Admit, ch.ReceiveOpened, ch.ReceiveClosed)
OF_WORK = (ch.Tokens, ch.Admitted, ch.Committed, ch.BlocksReady, ch.PrefillDone)  # what comes of requests
EARLY_S = 0.001  # seconds by which a sweep may come before the lease's time, by rounding


class Witnesses(NamedTuple):
    """Holds what the checks of all engines of a cluster share; each violation is passed to ``violated``.

    ``pinned`` is told of each pin that an engine is asked for. ``whole(request, choice)`` is the number of tokens
    of a whole answer. ``changes`` is told the slot of each worker that begins to change its role, ``serves`` that
    of one that serves its next role.
    """

    violated: Violated
    answers: Answers
    departed: Departed
    queues: QueueWitness
    pinned: Callable[[], None] = lambda: None
    whole: Callable[[Request, int], int] = lambda request, choice: 0
    changes: Callable[[str], None] = lambda slot: None
    serves: Callable[[str], None] = lambda slot: None


class EngineWitness:
    """Watches the messages of engine ``name``, beside the cluster's other ``witnesses``.

    ``requests`` are the clients' requests by number. ``patience_s`` is how long an answer may still be written
    after its client left. ``adapters`` are the ids of the adapters that requests were asked on, by number.
    ``reached`` is told each phase of a request that this engine begins.
    """

    def __init__(
        self,
        name: str,
        requests: dict[int, Request],
        lease_ttl_s: float,
        patience_s: float,
        witnesses: Witnesses,
        adapters: Mapping[int, str] = MappingProxyType({}),
        reached: Callable[[int, Phase], None] = lambda number, phase: None,
    ) -> None:
        self._reached = reached
        self._adapters, self._name, self._requests, self._ttl_s = adapters, name, requests, lease_ttl_s
        self.violated, self._answers, self._departed, self._queues, self._pinned, self._whole = witnesses[:6]
        self._turns_drained = -1  # the engine's turns since somebody was told that it has drained; -1: nobody was
        self._progress: dict[int, float] = {}
        self._epochs: dict[int, int] = {}
        self._cancelled: set[int] = set()  # requests whose cancel an earlier turn has taken
        self._leaving: set[int] = set()  # those whose cancel the next turn takes, with what came before it
        self.weights, self._patience_s = "", patience_s
        self._asked: dict[int, tuple[int, int]] = {}  # request and choice by the engine's key
        self._lengths: dict[int, float] = {}  # tokens of whole answers by the same

    def told(self, message: ch.ToEngine, now: float, true: float) -> None:
        """Checks and stores a message that the engine receives as its clock shows ``now``, at the time ``true``."""
        if isinstance(message, ch.Admit | ch.Prefill):
            self._queues.ends(number_of(message.request.request_id), true, placed=True)
            self._hold(message.request)
            is_admit = isinstance(message, ch.Admit)
            self._reached(number_of(message.request.request_id), "admitted" if is_admit else "reading")
        if isinstance(message, ch.ReceiveOpened) and message.key in self._asked:
            self._reached(self._asked[message.key][0], "receiving")
        if isinstance(message, ch.Admit):
            self._began(message.request)
            self._asked[message.key] = number_of(message.request.request_id), message.request.choice
        elif isinstance(message, ch.Cancel):
            self._leaving.add(message.key)
        elif isinstance(message, ch.Pin):
            self._pinned()
        elif isinstance(message, ch.Rearm):
            self._epochs[message.key] = message.epoch
        elif isinstance(message, ch.BlocksReceived):
            self._hold_epoch(message)
        if isinstance(message, TELLS_PROGRESS):
            self._progress[message.key] = now

    def drained(self) -> None:
        """Stores that somebody was told that nothing runs here any more, nor will.

        An engine that stood still may have to take first what came before.
        """
        self._turns_drained = max(0, self._turns_drained)

    def turned(self, swept: int, said: Sequence[ch.ToIo], now: float, true: float) -> None:
        """Checks the messages ``said`` that one turn of the engine sent as its clock showed ``now``, at the time
        ``true``; ``swept`` leases timed out in that turn.
        """
        if self._turns_drained >= 0:
            if self._turns_drained and any(isinstance(message, OF_WORK) for message in said):
                self.violated(f"{self._name}: works on after it was said to be drained")
            self._turns_drained += 1
        for message in said:
            if isinstance(message, ch.Tokens) and any(one.key in self._cancelled for one in message.outputs):
                self.violated(f"{self._name}: a sequence writes on after its cancel")
            if isinstance(message, ch.Tokens):
                written = [self._asked[one.key] for one in message.outputs]
                self._bounded(message.outputs)
                self._wanted(written, true)
                for number, _ in written:
                    self._reached(number, "writing")
                    self._queues.writes(number, true)
                self._nearly_ended(message.outputs)
        self._cancelled |= self._leaving
        self._leaving.clear()
        for message in said if swept else ():
            if not isinstance(message, ch.Ended) or message.error is None or message.error.type != "LeaseUnknown":
                continue
            if now - self._progress.get(message.key, 0.0) < self._ttl_s - EARLY_S:
                self.violated(
                    f"{self._name}: a lease was swept {now - self._progress[message.key]:.3f} s after its last "
                    f"progress, and has {self._ttl_s:g} s"
                )

    def _hold_epoch(self, message: ch.BlocksReceived) -> None:
        """Reports blocks of an epoch before that of the last Rearm.

        A part that another host of the ranks verified before it heard of the Rearm may count: nobody else hears of
        the Rearm earlier, and what is verified isn't written again.
        """
        in_parts = len(message.resident) == len(message.blocks)
        if message.epoch < self._epochs.get(message.key, 0) and not in_parts:
            self.violated(f"{self._name}: blocks of epoch {message.epoch} count after a later one began")

    def _nearly_ended(self, outputs: Sequence[ch.Output]) -> None:
        """Tells of answers whose last token a step has written."""
        for one in outputs:
            if one.run.output_index + len(one.run.token_ids) >= self._length(one.key):
                self._reached(self._asked[one.key][0], "ending")

    def _length(self, key: int) -> float:
        """Returns the number of tokens of the whole answer under the engine's ``key``; infinity if unknown."""
        if key not in self._lengths:
            number, choice = self._asked[key]
            request = self._requests.get(number)
            self._lengths[key] = math.inf if request is None else self._whole(request, choice)
        return self._lengths[key]

    def _bounded(self, outputs: Sequence[ch.Output]) -> None:
        """Reports steps that wrote more tokens of a sequence than its client's bound on drafts allows."""
        for one in outputs:
            request = self._requests.get(self._asked[one.key][0])
            most = None if request is None else request.sampling.max_drafts
            if most is not None and len(one.run.token_ids) > most + 1:
                number = self._asked[one.key][0]
                self.violated(f"request {number}: a step wrote {len(one.run.token_ids)} tokens, with {most} drafts")

    def _wanted(self, written: Sequence[tuple[int, int]], now: float) -> None:
        """Reports answers that are still written long after their clients left."""
        for who in written:
            if (late := now - self._departed.get(who, now)) > self._patience_s:
                self.violated(
                    f"request {who[0]} choice {who[1]} is written on at {self._name} {late:.1f} s after it was left"
                )

    def _began(self, asked: EngineRequest) -> None:
        """Checks that an answer that moved to this engine continues on the weights that it began with."""
        key = asked.request_id.partition(":")[0], asked.choice  # a batch line has no number of its own
        if asked.replayed and self._answers.get(key, self.weights) != self.weights:
            self.violated(
                f"request {key[0]} choice {key[1]} goes on at {self._name}, which has other weights or KV"
            )
        self._answers[key] = self.weights

    def _hold(self, asked: EngineRequest) -> None:
        number = number_of(asked.request_id)
        request = self._requests.get(number)
        if number < 0 and self._queues.only_lines and asked.priority != LOWEST_PRIORITY:
            self.violated(f"a line of a batch job at {self._name}: asked with priority {asked.priority}")
        if request is None:
            return
        name = f"request {number} at {self._name}"
        want = request.sampling
        if asked.choice:  # the prompt is scored once
            want = msgspec.structs.replace(want, prompt_logprobs=None)
        # A client that wants no text names no seed, and none is used.
        if (want.pooling and request.over_http) or request.ranking is not None:
            want = msgspec.structs.replace(want, seed=asked.sampling.seed)
        if alike(asked.sampling.grammar, want.grammar):
            want = msgspec.structs.replace(want, grammar=asked.sampling.grammar)
        if asked.sampling != want:
            self.violated(f"{name}: the engine is asked with another sampling than the client asked with")
        if asked.adapter_id != self._adapters.get(number, ""):
            self.violated(f"{name}: the engine is asked on adapter {asked.adapter_id!r}")
        if asked.priority != request.priority:
            self.violated(f"{name}: the engine is asked with priority {asked.priority}")
        if asked.tenant_salt != salt_of(request) or asked.choice >= request.n:
            self.violated(f"{name}: the engine is asked for another tenant or choice")
        if tuple(asked.token_ids[: asked.prompt_tokens]) != _prompt(request, asked.request_id):
            self.violated(f"{name}: the engine is asked with another prompt")


def number_of(wire_id: str) -> int:
    """Returns the request number of a wire id (rNUMBER:choice:attempt, rNUMBER-PROMPT:… for one of several
    prompts); -1 for an id that is no client's.
    """
    head = wire_id.partition(":")[0].partition("-")[0]
    return int(head[1:]) if head[:1] == "r" and head[1:].isdigit() else -1


def _prompt(request: Request, wire_id: str) -> tuple[int, ...]:
    """Returns the prompt that is asked under ``wire_id`` for ``request``, which may have several."""
    at = wire_id.partition(":")[0].partition("-")[2]
    return request.ranking.prompt_of(int(at)) if request.ranking is not None and at else request.prompt
