"""Checks the invariants of a simulated run, and compares each answer with the oracle's.

The paced engine's next token is a hash of the KV bytes that were read for it, so an answer is right only if every
page that was read was the right one, complete, and of the same sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import orjson

from baton.drill.checks import chat, messages, responses, tensors, text
from baton.drill.checks.keys import LET_IN, REFUSALS, KeyWitness
from baton.drill.checks.queues import FULL, OVER_RATE
from baton.drill.checks.ranking import wrong_ranking
from baton.drill.language import oracle
from baton.drill.scenario import PrefixPin, Request
from baton.protos.errors import BatonError, QuotaExceeded, WorkerLost
from baton.protos.json import Json

if TYPE_CHECKING:
    from baton.router.request.request import ChoiceStream

# Errors that a request on an adapter may end with while adapters come and go, or are more than a worker holds.
OF_ADAPTERS = {
    "model_not_found", "weights_gone", "adapter_not_loaded", "adapters_full", "no_worker", "unavailable",
}  # fmt: skip

# Ends of a gRPC call that no handler chose: its connection, its time, or the server that stops.
UNTYPED = {"status UNAVAILABLE", "status CANCELLED", "status DEADLINE_EXCEEDED"}


class Judge:
    """Collects the invariants that a run violated, as messages in ``violations``, and counts how requests ended.

    ``faulty`` says whether the run has faults that may fail a request. ``spared`` says that fewer workers end than
    a request has attempts, so that no request may fail for a lost worker. ``halt`` is called at each violation;
    ``sight`` is the model's; ``pins`` are prompts that are read as well.
    """

    def __init__(
        self,
        faulty: bool,
        requests: Sequence[Request] = (),
        halt: Callable[[], None] = lambda: None,
        spared: bool = False,
        sight: oracle.Sight = oracle.Sight(),
        pins: Sequence[PrefixPin] = (),
    ) -> None:
        self._pins = pins
        self._spared, self._sight = spared, sight
        self.violations: list[str] = []
        self.keys = KeyWitness((), self.violated)
        self.short_of_memory = False  # whether a handler may fail before it has begun
        self.queue_refuses = False  # whether queues are too small for all, which is judged elsewhere
        self._halt = halt
        self._alike: defaultdict[tuple[str, tuple[int, ...]], list[Request]] = defaultdict(list)
        for request in requests:  # by what two requests must have in common to share a block
            self._alike[request.tenant, request.prompt[:1]].append(request)
        self.adapters: Mapping[int, str] = {}  # the adapter id of each request that was asked on one, by number
        self._expected: dict[tuple[int, int, str], tuple[list[int], str]] = {}
        self.answered = self.failed = self.cancelled = 0
        self._faulty = faulty
        self._charged: dict[str, list[tuple[float, int]]] = {}

    def violated(self, text: str) -> None:
        """Adds ``text`` to the violations, unless it is among them."""
        if text not in self.violations:
            self.violations.append(text)
            self._halt()

    def refused(self, request: Request, error: BaseException) -> None:
        """Counts a request that the router rejected with ``error``; a violation if the run has no faults or quota
        to blame.
        """
        self.failed += 1
        limited = (request.tenant and isinstance(error, QuotaExceeded)) or self._no_room(error)
        if not self._faulty and not limited and not _for_its_adapter(request, error):
            self.violated(f"request {request.number}: refused without a fault: {error}")

    def _no_room(self, error: BaseException) -> bool:
        """Returns whether ``error`` says that a queue has no room or no time, where that is to be expected."""
        return self.queue_refuses and isinstance(error, BatonError) and error.label == FULL

    def charged(self, request: Request, now: float) -> None:
        """Stores that the rate of the request's key, or of its tenant, admitted it at ``now`` (loop time)."""
        whose = f"tenant {request.tenant}" if request.key is None else f"key {request.key}"
        self._charged.setdefault(whose, []).append((now, request.n))

    def rates_held(self, per_min: int) -> None:
        """Reports each tenant or key that was admitted more requests than ``per_min`` per minute allows, with a
        burst of a minute's worth.
        """
        for whose, charges in self._charged.items():
            seconds, most = charges[-1][0] - charges[0][0], max(n for _, n in charges)
            allowed = per_min + seconds * per_min / 60 + most
            if (taken := sum(n for _, n in charges)) > allowed:
                self.violated(f"{whose}: {taken} requests in {seconds:.1f} s at {per_min} per minute")

    def length(self, request: Request, choice: int) -> int:
        """Returns the number of tokens of the whole answer."""
        return len(self._answer(request, choice))

    def lost(self) -> None:
        """Counts a request whose router died while it ran, as cancelled."""
        self.cancelled += 1

    def ended(
        self, request: Request, stream: ChoiceStream, tokens: list[int], logprobs: int, error: BaseException | None
    ) -> None:
        """Compares one choice's ``tokens`` with the oracle's, and checks that its end fits what its client did.

        ``logprobs`` is the number of tokens that came with log-probabilities; ``error`` is what the stream raised,
        if anything.
        """
        name = f"request {request.number} choice {stream.choice}"
        want = self._answer(request, stream.choice)
        if tokens != want[: len(tokens)]:
            wrong = next((i for i, (a, b) in enumerate(zip(tokens, want, strict=False)) if a != b), len(want))
            self.violated(f"{name}: token {wrong} of {len(tokens)} is not the oracle's, which has {len(want)}")
        if request.sampling.logprobs is not None and logprobs != len(tokens):
            self.violated(f"{name}: {logprobs} log-probabilities of {len(tokens)} tokens")
        if error is None:
            self._finished(name, stream, tokens, want, request)
            self._scored(name, stream, request)
        elif request.cancels and stream.cancel_reason:
            self.cancelled += 1
        elif not isinstance(error, BatonError):
            self.violated(f"{name}: ended with {type(error).__name__}: {error}, which is no typed error")
        else:
            self.failed += 1
            scored = request.sampling.pooling or request.sampling.prompt_logprobs is not None
            if self._spared and isinstance(error, WorkerLost) and not scored:
                self.violated(f"{name}: lost though fewer workers ended than it had tries: {error.message}")
            excused = request.deadline_after is not None or self._no_room(error)
            if not self._faulty and not excused and not _for_its_adapter(request, error):
                self.violated(f"{name}: failed without a fault: {error.label}: {error.message}")

    def replied(self, request: Request, status: int, body: bytes) -> str:
        """Compares a whole reply over HTTP with the oracle's; returns its error's code, "complete" for none."""
        name = f"request {request.number}"
        read = status == 200 and not request.sampling.pooling and request.ranking is None
        reply = _read(request, body) if read else None
        error = _error(request, status, body) if status != 200 else "" if reply is None else reply.error
        if self.keys.ended(request, REFUSALS.get(status, LET_IN), not error):
            return str(error)
        if error:
            self._failed_over_http(request, error)
            return str(error)
        self.answered += request.n
        for said in self._wrong_over_http(request, reply, body):
            self.violated(f"{name}: {said}")
        return "complete"

    def replied_over_grpc(self, request: Request, reply: text.TextReply) -> str:
        """Compares a whole reply over gRPC with the oracle's; returns its error's code, "complete" for none."""
        name = f"request {request.number}"
        if self.keys.ended(request, reply.error if reply.error in REFUSALS.values() else LET_IN, not reply.error):
            return reply.error
        if reply.error:
            self._failed_over_http(request, reply.error)
            short = self.short_of_memory and reply.error == "status UNKNOWN"
            if reply.error.startswith("status ") and reply.error not in UNTYPED and not short:
                self.violated(f"{name}: ended with {reply.error}, which is no typed error")
            return reply.error
        self.answered += request.n
        for said in self._wrong_over_http(request, reply, b""):
            self.violated(f"{name}: {said}")
        return "complete"

    def _wrong_over_http(
        self, request: Request, reply: text.TextReply | chat.ChatReply | None, body: bytes
    ) -> Iterator[str]:
        """Returns what is wrong with a reply with status 200; ``reply`` is None for vectors and rankings."""
        if request.ranking is not None:
            return wrong_ranking(request, body, self._sight)
        if reply is None:
            return text.vector_wrong(request, body, self._on(request))
        want = [text.text_of(request, *self._whole(request, choice)) for choice in range(request.n)]
        if (
            not self._faulty
            and request.n == 1
            and (told := cached(reply.usage)) > (most := self._shareable(request))
        ):
            self.violated(f"request {request.number}: {told} cached tokens, and its tenant can have left {most}")
        if request.tensors and isinstance(reply, text.TextReply):
            return tensors.wrong_tensors(request, reply, want)
        if isinstance(reply, chat.ChatReply):
            return chat.wrong_chat(request, reply, want)
        return text.wrong(request, reply, want)

    def _failed_over_http(self, request: Request, error: str) -> None:
        self.failed += 1
        scored = request.sampling.pooling or request.sampling.prompt_logprobs is not None
        if self._spared and error == "worker_lost" and not scored:
            self.violated(f"request {request.number}: lost though fewer workers ended than it had tries")
        excused = request.deadline_after is not None or (request.adapter and error in OF_ADAPTERS)
        excused = excused or (request.key is not None and error in OVER_RATE)
        excused = excused or (self.queue_refuses and error == FULL)
        if not self._faulty and not excused:
            self.violated(f"request {request.number}: failed without a fault: {error}")

    def _finished(
        self, name: str, stream: ChoiceStream, tokens: list[int], want: list[int], request: Request
    ) -> None:
        self.answered += 1
        summary = stream.summary
        if tokens != want:
            self.violated(f"{name}: ended after {len(tokens)} of {len(want)} tokens, as if complete")
        reason = self._expected[self._key(request, stream.choice)][1]
        if summary.finish_reason != reason and not (reason == "stop" and len(want) == request.sampling.max_tokens):
            self.violated(f"{name}: finish reason {summary.finish_reason!r}, the oracle's is {reason!r}")
        if summary.completion_tokens != len(tokens) or summary.prompt_tokens != len(request.prompt):
            self.violated(f"{name}: usage says {summary.prompt_tokens} + {summary.completion_tokens} tokens")
        alone = request.n == 1 and summary.attempts == 1  # else it may find what it left itself
        if alone and summary.cached_tokens > (most := self._shareable(request)):
            self.violated(f"{name}: {summary.cached_tokens} cached tokens, and its tenant can have left {most}")

    def _scored(self, name: str, stream: ChoiceStream, request: Request) -> None:
        sampling, summary = request.sampling, stream.summary
        if stream.choice == 0 and sampling.prompt_logprobs is not None:
            scored = [one.chosen.token_id for one in summary.prompt_logprobs]
            if scored != list(request.prompt[1:]):
                self.violated(f"{name}: {len(scored)} tokens of the prompt are scored, or others than it has")
        if stream.choice == 0 and sampling.pooling:
            found = np.frombuffer(summary.pooled, "<f4")
            want = np.frombuffer(oracle.pooled(request.prompt, sampling.pooling, self._on(request)), "<f4")
            if found.shape != want.shape or not np.allclose(found, want, atol=text.CLOSE):
                self.violated(f"{name}: the embedding is not the oracle's")

    def _shareable(self, request: Request) -> int:
        """Returns the length of the longest prefix of the prompt that another request of this tenant and adapter
        may have cached.
        """
        mine, alike = self._on(request), self._alike.get((request.tenant, request.prompt[:1]), ())
        others = (r for r in alike if self._on(r) == mine and r.number != request.number)
        texts = ((*r.prompt, *self._answer(r, choice)) for r in others for choice in range(r.n))
        pinned = (pin.prompt for pin in self._pins if not mine and pin.tenant == request.tenant)
        return max((_common(request.prompt, text) for text in (*texts, *pinned)), default=0)

    def _answer(self, request: Request, choice: int) -> list[int]:
        return self._whole(request, choice)[0]

    def _whole(self, request: Request, choice: int) -> tuple[list[int], str]:
        key = self._key(request, choice)
        if key not in self._expected:
            on = self._on(request)
            self._expected[key] = oracle.answer(request.prompt, request.sampling, choice, on, self._sight)
        return self._expected[key]

    def _key(self, request: Request, choice: int) -> tuple[int, int, str]:
        return request.number, choice, self._on(request)

    def _on(self, request: Request) -> str:
        """Returns the id of the adapter that the request was asked on, "" for none."""
        return self.adapters.get(request.number, "")


def _read(request: Request, body: bytes) -> text.TextReply | chat.ChatReply:
    if request.tensors:
        return tensors.read_tensors(request, body)
    if request.anthropic:
        return messages.read_messages(request, body)
    if request.responses:
        return responses.read_responses(request, body)
    return chat.read_chat(request, body) if request.messages else text.read(request, body)


def _error(request: Request, status: int, body: bytes) -> str:
    if request.tensors:
        return tensors.status_code(status, body)
    if request.anthropic:
        return messages.error_of(status, body)
    return str(orjson.loads(body)["error"]["code"])


def cached(usage: Json | None) -> int:
    """Returns the cached tokens of the prompt that a reply's usage names, 0 where it names none."""
    return ((usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _for_its_adapter(request: Request, error: BaseException) -> bool:
    """Returns whether ``error`` may be due to the adapter that the request is on."""
    return bool(request.adapter) and isinstance(error, BatonError) and error.label in OF_ADAPTERS


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    if a[:1] != b[:1]:
        return 0
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
