"""Meters answers as a client sees them: seconds from arrival, tokens, outcomes, SLOs.

Knows nothing of workers; times are by the router's own clock. Each choice is measured and judged by itself; a
request counts once, when its last choice has ended. A piece of several tokens costs what a piece of one does, which
is a division and two additions to lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.protos.adapter_id import name_of
from baton.protos.errors import BatonError
from baton.router.answer.generation import Generation
from baton.router.observe.live import GOOD_ENDS, ChoiceOutcome, verdict
from baton.router.observe.tallies import Tallies
from baton.router.request.context_class import ContextClasses
from baton.router.request.request import ChoiceStream, ChoiceSummary


class RequestEnds:
    """Says how a request of ``choices`` choices ended, once the last of them has: with an error if any did, else
    cancelled if any was, else as the first to end.
    """

    __slots__ = ("_left", "_outcome")

    def __init__(self, choices: int) -> None:
        self._left, self._outcome = choices, ""

    def end(self, outcome: str) -> str:
        """Takes the outcome of a choice that ended; returns the request's, "" while choices are left."""
        if not self._outcome or _weight(outcome) > _weight(self._outcome):
            self._outcome = outcome
        self._left -= 1
        return "" if self._left else self._outcome


def _weight(outcome: str) -> int:
    return 0 if outcome in GOOD_ENDS else 1 if outcome == "cancelled" else 2


class Meter:
    """Measures one choice as its client sees it.

    Call ``took`` for each piece and ``ended`` once; later calls of ``ended`` do nothing. ``arrived`` is on the
    tallies' clock. ``prompt``: the prompt's token ids; ``counts_prompt``: whether this choice counts them (one
    choice per prompt does). ``request`` is shared by a request's choices; without it the choice is the only one.
    ``recorded``: it is written to the trace file, where there is one.
    """

    __slots__ = (
        "_adapter_id",
        "_arrived",
        "_first_at",
        "_last_at",
        "_longest_gap",
        "_over",
        "_prompt",
        "_recorded",
        "_request",
        "_request_id",
        "_summary",
        "_tallies",
        "_tally",
        "_tokens",
        "counts_prompt",
    )

    def __init__(
        self,
        tallies: Tallies,
        arrived: float,
        model_id: str,
        summary: ChoiceSummary,
        counts_prompt: bool,
        prompt: Sequence[int] = (),
        request_id: str = "",
        adapter_id: str = "",
        request: RequestEnds | None = None,
        recorded: bool = True,
    ) -> None:
        self._adapter_id, self._request = adapter_id, request or RequestEnds(1)
        self._recorded = recorded
        self._tallies, self._tally = tallies, tallies.of(model_id, summary.context_class)
        self._arrived, self._summary, self._prompt = arrived, summary, prompt
        self.counts_prompt, self._request_id = counts_prompt, request_id
        self._tokens, self._over = 0, False
        self._first_at: float | None = None
        self._last_at = self._longest_gap = 0.0

    def took(self, tokens: int) -> None:
        """Counts ``tokens`` that reached the client together, now. The first piece is the first token's, also where
        the answer has none: an embedding's, or that of a prompt which was only scored.
        """
        now = self._tallies.now()
        if self._first_at is None:
            self._first_at = now
            self._tallies.first(self._tally, now - self._arrived, self._summary.trace_id)
        elif tokens:
            gap = now - self._last_at
            self._tally.gaps.count(gap, tokens)
            if gap > self._longest_gap:
                self._longest_gap = gap
        self._tokens += tokens
        self._last_at = now

    def ended(self, outcome: str) -> None:
        """Counts the end of the choice; ``outcome`` is a finish_reason, an error label or "cancelled"."""
        if self._over:
            return
        self._over = True
        tallies, summary = self._tallies, self._summary
        lasted = tallies.now() - self._arrived
        chain = summary.chain if self.counts_prompt else None
        if request := self._request.end(outcome):
            self._tally.requests.append(request)
        tallies.ended(self._tally, self._seen(outcome, lasted), chain, summary.trace_id)
        if self._recorded and tallies.recorder is not None:
            tallies.recorder.record(lasted, self._prompt, self._tokens, summary.chain, self._adapter_id)

    def _seen(self, outcome: str, lasted: float) -> ChoiceOutcome:
        """Returns what the client saw, as values alone, so that nothing large waits with them."""
        summary, tokens, first_at = self._summary, self._tokens, self._first_at
        ttft = None if first_at is None else first_at - self._arrived
        tpot = None if first_at is None or tokens < 2 else (self._last_at - first_at) / (tokens - 1)
        slo_ttft, slo_tpot = summary.slo_ttft_s, summary.slo_tpot_s
        judged = (slo_ttft or slo_tpot) and outcome != "cancelled"
        return ChoiceOutcome(
            self._tallies.wall_clock(),
            self._request_id,
            self._tally.model,
            summary.context_class,
            outcome,
            summary.way,
            summary.prefill_worker,
            summary.decode_worker,
            summary.prompt_tokens,
            summary.cached_tokens,
            tokens,
            lasted,
            ttft,
            tpot,
            self._longest_gap,
            summary.stations,
            slo_ttft,
            slo_tpot,
            verdict(ttft, tpot, slo_ttft, slo_tpot, outcome in GOOD_ENDS) if judged else "",
            name_of(self._adapter_id),
            summary.accepted_drafts,
            summary.rejected_drafts,
        )


class NoMeter:
    """Implements Meter's methods without keeping anything, for a router without telemetry."""

    __slots__ = ()

    def took(self, tokens: int) -> None:
        """Ignores tokens that arrived."""

    def ended(self, outcome: str) -> None:
        """Ignores the end of a choice."""


ChoiceMeter = Meter | NoMeter


class Metering(Protocol):
    """Makes a meter for each choice of a call."""

    def meters(self, generation: Generation, streams: Sequence[ChoiceStream], prompt: int) -> Sequence[ChoiceMeter]:
        """Returns a meter for each choice of ``generation.prompts[prompt]``, in the order of ``streams``."""

    def refused(self, generation: Generation, prompt: int, error: BatonError) -> None:
        """Counts ``generation.prompts[prompt]``, which dispatch refused with ``error``."""

    def flush(self) -> None:
        """Writes the lines that are buffered for the trace file."""


class NoMetering:
    """Meters nothing: for a router without telemetry and without a trace file."""

    def meters(self, generation: Generation, streams: Sequence[ChoiceStream], prompt: int) -> Sequence[ChoiceMeter]:
        """Returns meters that keep nothing."""
        return [NoMeter() for _ in streams]

    def refused(self, generation: Generation, prompt: int, error: BatonError) -> None:
        """Ignores a refused prompt."""

    def flush(self) -> None:
        """Does nothing, because nothing is buffered."""


class TallyMetering:
    """Makes meters that add to ``tallies``; ``classes`` gives the context class of prompts that dispatch
    refused.
    """

    def __init__(self, tallies: Tallies, classes: ContextClasses) -> None:
        self.tallies, self._classes = tallies, classes

    def meters(self, generation: Generation, streams: Sequence[ChoiceStream], prompt: int) -> Sequence[ChoiceMeter]:
        """Returns a meter for each choice; the first one counts the prompt's tokens, the last one that ends the
        request.
        """
        request = RequestEnds(len(streams))
        return [self._meter(generation, stream, prompt, request) for stream in streams]

    def _meter(self, generation: Generation, stream: ChoiceStream, prompt: int, request: RequestEnds) -> Meter:
        return Meter(
            self.tallies,
            generation.arrived,
            generation.entry.model_id,
            stream.summary,
            stream.choice == 0,
            generation.prompts[prompt],
            generation.request_of(prompt),
            generation.context.adapter_id,
            request,
            not generation.context.can_wait,
        )

    def refused(self, generation: Generation, prompt: int, error: BatonError) -> None:
        """Counts a refused prompt among the requests, with the error's label as its outcome."""
        adapter = name_of(generation.context.adapter_id)
        context_class = self._classes.tag(len(generation.prompts[prompt]), adapter)
        self.tallies.metrics.requests.labels(generation.entry.model_id, context_class, error.label).inc()

    def flush(self) -> None:
        """Writes the buffered lines of the trace file, if a trace is recorded."""
        if self.tallies.recorder is not None:
            self.tallies.recorder.write()
