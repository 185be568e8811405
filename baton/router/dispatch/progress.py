"""Progress of one choice: the stream of its tokens, and the times and counts of its summary.

Fed with workers' messages; it outlives attempts, so that every token is emitted once however often it is generated.
Knows nothing of connections, queues or retries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton.protos.convert import logprobs_from_pb, run_from_pb, stations_from_pb
from baton.protos.errors import WorkerLost
from baton.protos.nouns import Station, TokenRun
from baton.protos.v1 import common_pb2 as c
from baton.protos.v1 import worker_pb2 as w
from baton.router.request.request import ChoiceStream, ChoiceSummary, RouterRequest

MOMENT_S = 1e-3  # the least that is left of an SLO in seconds, because 0 stands for "no SLO"
OF_DECODE, OF_PREFILL = ("prefill",), ("fetch", "prefill", "transfer")


class ChoiceProgress:
    """Feeds one choice's stream and keeps its summary.

    Times are seconds of ``clock``, since construction.
    """

    def __init__(self, request: RouterRequest, choice: int, context_class: str, clock: Callable[[], float]) -> None:
        context = request.context
        summary = ChoiceSummary(
            prompt_tokens=len(request.token_ids),
            context_class=context_class,
            slo_ttft_s=context.slo_ttft_s,
            slo_tpot_s=context.slo_tpot_s,
            choice=choice,
        )
        self.stream = ChoiceStream(choice, summary, clock)
        self._request, self._clock, self._opened = request, clock, clock()
        self._first_at: float | None = None
        self._decoding = self._cached_known = False
        self._last: TokenRun | None = None
        scored = request.sampling.prompt_logprobs is not None or bool(request.sampling.pooling)
        self._unscored = choice == 0 and scored
        self._early: list[TokenRun] = []

    @property
    def summary(self) -> ChoiceSummary:
        """Returns the summary of the choice's stream."""
        return self.stream.summary

    @property
    def tokens(self) -> tuple[int, ...]:
        """Returns the token ids that a new attempt has to prefill: the prompt, then the outputs already emitted."""
        emitted, prompt = self.stream.emitted, self._request.token_ids
        return (*prompt, *emitted) if emitted else prompt

    @property
    def answered(self) -> bool:
        """Returns whether the last token has arrived from a worker."""
        return self._last is not None

    @property
    def unscored(self) -> bool:
        """Returns whether the prompt's log-probabilities or its pooled vector are asked for and still missing."""
        return self._unscored

    def elapsed(self) -> float:
        """Returns the seconds since the request was opened."""
        return self._clock() - self._opened

    def ttft_left(self) -> float:
        """Returns the seconds left for the first token, a tiny positive number once overdue; 0 means no SLO, or the
        token is out.
        """
        slo = self._request.context.slo_ttft_s
        return max(MOMENT_S, slo - self.elapsed()) if slo and self._first_at is None else 0.0

    def restart(self) -> None:
        """Drops outputs that were held back, because a new attempt generates them again and may differ."""
        self._early.clear()

    def take_decode(self, output: w.RequestTokens) -> None:
        """Takes the choice's outputs and times from a decode worker's frame.

        Raises BatonError if tokens are missing in between.
        """
        self._score(output)
        self._emit(output.run)
        if output.stations:
            self._time(output.stations, OF_DECODE)
        self._count_cached(output.cached_tokens)

    def take_prefill(self, response: w.PrefillResponse) -> None:
        """Takes the first token and the times from the prefill worker's own reply."""
        self._score(response)
        self._emit(response.first)
        self._time(response.stations, OF_PREFILL)
        self._count_cached(response.cached_tokens)

    def end_where_full(self) -> bool:
        """Ends the choice if every token that it may have is out and its worker was lost before the run that says
        so; returns whether it has ended. Another attempt would write a token too many.

        The reason is "length" even where a grammar may have been complete, which only the lost worker knew.
        """
        count = len(self.stream.emitted)
        if self._last is None and count >= self._request.sampling.max_tokens:
            self._last = TokenRun(count, (), (), "length", None)
        return self.answered

    def complete(self) -> None:
        """Emits the last run, which ends the stream, because no more times or counts will come. Idempotent."""
        if self._last is None:
            return
        if self._unscored:
            self.stream.fail(WorkerLost("what the prompt gave was lost with its prefill worker: ask again"))
        self._push(self._last)
        if self._first_at is not None and "decode" not in self.summary.stations:
            self.summary.took(Station("decode", self._clock() - self._first_at))

    def _emit(self, pb: c.TokenRun) -> None:
        """Gives out each output once. The last run waits for ``complete``: by then usage and times are whole."""
        run = run_from_pb(pb)
        if self._unscored and not run.finish_reason:
            self._early.append(run)
        elif not run.finish_reason:
            self._push(run)
        elif self._last is None:
            self._last = run
            self._request.pin.fix()

    def _score(self, news: w.RequestTokens | w.PrefillResponse) -> None:
        """Takes what is known of the prompt, once, and then gives out the tokens that came before it."""
        if not self._unscored:
            return
        alone = len(self._request.token_ids) == 1 and not self._request.sampling.pooling
        if news.prompt_logprobs or news.pooled or alone:
            self._unscored = False
            self._request.pin.fix()
            self.summary.score(news.pooled, tuple(map(logprobs_from_pb, news.prompt_logprobs)))
            early, self._early = self._early, []
            for run in early:
                self._push(run)

    def _push(self, run: TokenRun) -> None:
        if not self.stream.push(run):
            return
        self._request.pin.fix()
        if self._first_at is None:
            self._first_at = self._clock()
            self.summary.took(Station("ttft", self._first_at - self._opened))
        elif not self._decoding:
            self._decoding = True
            self.summary.took(Station("first_decode", self._clock() - self._first_at))

    def _time(self, stations: Iterable[c.Station], names: tuple[str, ...]) -> None:
        """Adds a worker's times; its own queue is not the router's, and "decode" is measured here."""
        for station in stations_from_pb(stations):
            if station.name == "queue":
                self.summary.took(Station("prefill_queue", station.seconds))
            elif station.name in names:
                self.summary.took(station)

    def _count_cached(self, tokens: int) -> None:
        """Keeps the first attempt's count, because a replay finds what the request itself left in the cache."""
        if not self._cached_known:
            self._cached_known = True
            self.summary.find_cached(tokens)
