"""Collects what a decode engine tells of a step: the tokens of each sequence that advanced, with times and scores.

Knows nothing of pages, batches or of how a message travels. Torch-free. An answer's end may be known a step late,
when its grammar was asked about the last token and has yet to reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.decode_worker.engine.requests import RequestState
from baton.protos import channel as ch
from baton.protos.nouns import TokenRun


class StepOutputs:
    """Collects the outputs of one step until ``clear``. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._outputs: list[ch.Output] = []
        self._late: set[int] = set()  # keys of answers whose grammars owe a reply about the last token

    def take(self, key: int, state: RequestState, run: TokenRun) -> bool:
        """Adds ``run``, the next tokens of request ``key``; returns whether they end its answer.

        The first run of a request carries its times, its prompt's scores and the pooled vector.
        """
        now, first, sequence = self._clock(), state.first_at is None, state.job.sequence
        if state.first_at is None:
            state.first_at = now
        stations = (state.first_stations(now) if first else ()) + state.last_stations(run, now)
        scores, pooled = (tuple(sequence.scores), sequence.pooled()) if first else ((), b"")
        self._outputs.append(ch.Output(key, run, state.cached_tokens if first else 0, stations, scores, pooled))
        if not run.finish_reason and not sequence.ready:
            self._late.add(key)
        return bool(run.finish_reason)

    def owe(self, key: int) -> None:
        """Notes that the grammar of request ``key`` has yet to tell whether its tokens so far are all."""
        self._late.add(key)

    def take_late(self, requests: Mapping[int, RequestState]) -> list[int]:
        """Adds the ends of answers whose grammars have replied that the last token was the last one; returns their
        keys.

        ``requests`` are those that have not ended, by key.
        """
        ended = []
        for key in tuple(self._late):
            state = requests.get(key)
            if state is not None and not state.job.sequence.ready:
                continue
            self._late.remove(key)
            if state is not None and (run := state.job.sequence.late_end()) is not None:
                self.take(key, state, run)
                ended.append(key)
        return ended

    def clear(self) -> tuple[ch.Output, ...]:
        """Returns the outputs since the last call, in the order in which they were taken."""
        found, self._outputs = tuple(self._outputs), []
        return found
