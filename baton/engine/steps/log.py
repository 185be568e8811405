"""Records an engine's steps: median duration, cost samples, token counts. Torch-free.

Knows nothing of plans' meaning, of channels or of who reads the figures.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from baton.protos.measurements import StepSample

MEDIAN_OVER = 512  # steps whose times the median is of
SAMPLES_KEPT = 64  # samples kept until somebody takes them


class StepLog:
    """Counts steps and their tokens, and keeps recent durations and the samples that weren't taken yet."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens_prefilled = 0
        self.tokens_decoded = 0
        self.busy_seconds = 0.0  # sum of the steps' durations
        self.prefill_pairs = 0.0  # (query, key) pairs of prefill attention
        self.decode_context = 0  # context tokens that decoding sequences read
        self._seconds: deque[float] = deque(maxlen=MEDIAN_OVER)
        self._samples: deque[StepSample] = deque(maxlen=SAMPLES_KEPT)

    def note(self, sample: StepSample) -> None:
        """Adds one step to the counts and samples."""
        self.steps += 1
        self.tokens_prefilled += sample.prefill_tokens
        self.tokens_decoded += sample.decode_sequences
        self.busy_seconds += sample.seconds
        self.prefill_pairs += sample.prefill_attention
        self.decode_context += sample.decode_context
        self._seconds.append(sample.seconds)
        self._samples.append(sample)

    def note_accepted(self, tokens: int) -> None:
        """Counts ``tokens`` accepted drafts of the last step as decoded tokens."""
        self.tokens_decoded += tokens

    def note_discarded(self, sample: StepSample) -> None:
        """Takes the rows of ``sample``, whose results were thrown away, out of the counts of tokens."""
        self.tokens_prefilled -= sample.prefill_tokens
        self.tokens_decoded -= sample.decode_sequences

    @property
    def seconds_p50(self) -> float:
        """Returns the median duration of the last ``MEDIAN_OVER`` steps, in seconds; 0 before the first."""
        return median(self._seconds) if self._seconds else 0.0

    def take_samples(self) -> tuple[StepSample, ...]:
        """Returns the samples since the last call, oldest first and at most ``SAMPLES_KEPT``."""
        taken = tuple(self._samples)
        self._samples.clear()
        return taken
