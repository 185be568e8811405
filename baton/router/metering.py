"""What answers add to the router's metrics, as a client sees them: seconds from arrival, tokens, outcomes, SLOs.

Knows nothing of workers; times are by the router's own clock. One choice counts as one request. A piece of several
tokens costs what a piece of one does, which is a look-up and two additions.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.router.live import GOOD_ENDS, Ended, verdict
from baton.router.request import Summary
from baton.router.tallies import Tallies


class Meter:
    """Measures one choice. ``took`` for each piece, ``ended`` once at its end; later calls do nothing.

    ``record`` is told, at the end, of seconds since arrival and of tokens.
    """

    __slots__ = (
        "_arrived",
        "_clock",
        "_ended_at",
        "_first_at",
        "_last_at",
        "_longest_gap",
        "_outcome",
        "_record",
        "_request_id",
        "_summary",
        "_tallies",
        "_tally",
        "_tokens",
        "_wall_at",
        "_wall_clock",
        "counts_prompt",
    )

    def __init__(
        self,
        tallies: Tallies,
        clock: Callable[[], float],
        arrived: float,
        model_id: str,
        summary: Summary,
        counts_prompt: bool,
        record: Callable[[float, int], None] | None = None,
        request_id: str = "",
        wall_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._tallies, self._tally = tallies, tallies.of(model_id, summary.context_class)
        self._clock, self._arrived, self._summary = clock, arrived, summary
        self.counts_prompt, self._record = counts_prompt, record
        self._request_id, self._wall_clock = request_id, wall_clock
        self._tokens, self._outcome = 0, ""
        self._first_at = self._last_at = self._longest_gap = 0.0

    def took(self, tokens: int) -> None:
        """``tokens`` more arrived, together."""
        now = self._clock()
        if now >= self._tallies.due:
            self._tallies.fold()
        if self._tokens == 0:
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
        """``outcome``: a finish_reason, an error label or "cancelled"."""
        if self._outcome:
            return
        self._outcome = outcome
        self._ended_at = now = self._clock()
        self._wall_at = self._wall_clock()
        if now >= self._tallies.due:
            self._tallies.fold()
        self._tallies.ended(self._tally, self)
        if self._summary.prompt_logprobs:  # too large to wait
            self._tallies.fold()
        if self._record is not None:
            self._record(now - self._arrived, self._tokens)

    @property
    def trace_id(self) -> str:
        """Of a trace that is kept."""
        return self._summary.trace_id

    def over(self) -> Ended:
        """What its client saw; once it has ended."""
        summary, tokens, outcome = self._summary, self._tokens, self._outcome
        ttft = self._first_at - self._arrived if tokens else None
        tpot = (self._last_at - self._first_at) / (tokens - 1) if tokens > 1 else None
        slos = summary.slo_ttft_s, summary.slo_tpot_s
        return Ended(
            at=self._wall_at,
            request_id=self._request_id,
            model=self._tally.labels[0],
            context_class=summary.context_class,
            outcome=outcome,
            way=summary.way,
            prefill=summary.prefill_worker,
            decode=summary.decode_worker,
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=summary.cached_tokens,
            output_tokens=tokens,
            duration_s=self._ended_at - self._arrived,
            ttft_s=ttft,
            tpot_s=tpot,
            longest_gap_s=self._longest_gap,
            stations=dict(summary.stations),
            slo_ttft_s=slos[0],
            slo_tpot_s=slos[1],
            verdict="" if outcome == "cancelled" else verdict(ttft, tpot, *slos, outcome in GOOD_ENDS),
        )


class Unmetered:
    """What a router without telemetry has in a Meter's place."""

    __slots__ = ()

    def took(self, tokens: int) -> None:
        """Nothing; nor does the other."""

    def ended(self, outcome: str) -> None:
        """Nothing."""
