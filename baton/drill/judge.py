"""Holds each run against its invariants, and each answer against its oracle.

The paced engine's token is a hash of the KV bytes that were read for it, so an answer is right only if every page
that it read was the right one, whole, and its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.drill.scenario import EOS, Request
from baton.drill.worker import MODEL
from baton.engine.backends.paced.runner import paced_answer
from baton.protos.errors import BatonError

if TYPE_CHECKING:
    from baton.router.request.request import ChoiceStream


class Judge:
    """Collects what was violated. ``faulty`` says whether the run has faults that may fail a request."""

    def __init__(self, faulty: bool, requests: Sequence[Request] = ()) -> None:
        self.violations: list[str] = []
        self._requests = requests
        self._expected: dict[tuple[int, int], list[int]] = {}
        self.answered = self.failed = self.cancelled = 0
        self._faulty = faulty

    def violated(self, text: str) -> None:
        """Notes a violation, once."""
        if text not in self.violations:
            self.violations.append(text)

    def ended(self, request: Request, stream: ChoiceStream, tokens: list[int], error: BaseException | None) -> None:
        """Holds one choice's answer against the oracle, and its end against what its client did."""
        name = f"request {request.number} choice {stream.choice}"
        want = self._answer(request, stream.choice)
        if tokens != want[: len(tokens)]:
            wrong = next(i for i, (a, b) in enumerate(zip(tokens, want, strict=False)) if a != b)
            self.violated(f"{name}: token {wrong} is {tokens[wrong]}, the oracle's is {want[wrong]}")
        if error is None:
            self._finished(name, stream, tokens, want, request)
        elif request.cancel_after is not None and stream.cancel_reason:
            self.cancelled += 1
        elif not isinstance(error, BatonError):
            self.violated(f"{name}: ended with {type(error).__name__}: {error}, which is no typed error")
        else:
            self.failed += 1
            if not self._faulty and request.deadline_after is None:
                self.violated(f"{name}: failed without a fault: {error.label}: {error.message}")

    def _finished(
        self, name: str, stream: ChoiceStream, tokens: list[int], want: list[int], request: Request
    ) -> None:
        self.answered += 1
        summary = stream.summary
        if tokens != want:
            self.violated(f"{name}: ended after {len(tokens)} of {len(want)} tokens, as if complete")
        stops = set(request.sampling.stop_token_ids) | (set() if request.sampling.ignore_eos else {EOS})
        reason = "stop" if want and want[-1] in stops else "length"
        if summary.finish_reason != reason and not (reason == "stop" and len(want) == request.sampling.max_tokens):
            self.violated(f"{name}: finish reason {summary.finish_reason!r}, the oracle's is {reason!r}")
        if summary.completion_tokens != len(tokens) or summary.prompt_tokens != len(request.prompt):
            self.violated(f"{name}: usage says {summary.prompt_tokens} + {summary.completion_tokens} tokens")
        alone = request.n == 1 and summary.attempts == 1  # else it may find what it left itself
        if alone and summary.cached_tokens > (most := self._shareable(request)):
            self.violated(f"{name}: {summary.cached_tokens} cached tokens, and its tenant can have left {most}")

    def _shareable(self, request: Request) -> int:
        """Returns the longest prefix of the prompt that another request of the same tenant may have left cached."""
        others = (r for r in self._requests if r.tenant == request.tenant and r.number != request.number)
        texts = ((*r.prompt, *self._answer(r, choice)) for r in others for choice in range(r.n))
        return max((_common(request.prompt, text) for text in texts), default=0)

    def _answer(self, request: Request, choice: int) -> list[int]:
        key = request.number, choice
        if key not in self._expected:
            self._expected[key] = expected(request, choice)
        return self._expected[key]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def expected(request: Request, choice: int) -> list[int]:
    """Returns the whole answer to a choice, computed without pages."""
    return paced_answer(request.prompt, request.sampling, choice, eos_token_ids=(EOS,), **MODEL)
