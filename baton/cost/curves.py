"""What a step, a prompt or a transfer will take, from a curve. Torch-free, pure.

Knows nothing of how a curve came about (``fit`` or ``profiles``) or of what is decided with it.
"""

from __future__ import annotations

from baton.protos.nouns import StepCurve, StepSample, TransferCurve


def step_features(sample: StepSample) -> tuple[float, float, float, float, float]:
    """Returns what each coefficient of a StepCurve is multiplied with, in its order."""
    rows = sample.prefill_tokens + sample.draft_tokens  # a draft's row shares its sequence's keys, as a prompt's do
    return (1.0, rows, sample.prefill_attention, sample.decode_sequences, sample.decode_context)


def step_seconds(curve: StepCurve, sample: StepSample) -> float:
    """Returns seconds of one engine step of that shape (the sample's own ``seconds`` is not looked at)."""
    return (
        curve.fixed
        + curve.prefill_token * (sample.prefill_tokens + sample.draft_tokens)
        + curve.prefill_pair * sample.prefill_attention
        + curve.decode_sequence * sample.decode_sequences
        + curve.decode_context_token * sample.decode_context
    )


def prefill_seconds(curve: StepCurve, uncached: int, cached: int = 0, chunk_tokens: int = 512) -> float:
    """Returns seconds to read ``uncached`` tokens after ``cached`` ones, alone, in steps of ``chunk_tokens``."""
    if uncached <= 0:
        return 0.0
    chunks = -(-uncached // chunk_tokens)
    attention = uncached * (cached + uncached / 2)  # the sum over chunks telescopes to the whole
    return chunks * curve.fixed + curve.prefill_token * uncached + curve.prefill_pair * attention


def decode_seconds(curve: StepCurve, sequences: int, context: int) -> float:
    """Returns seconds of one step that writes one token of each of ``sequences``, which read ``context`` tokens in
    all.
    """
    return step_seconds(curve, StepSample(0, 0.0, sequences, context, 0.0))


def transfer_seconds(curve: TransferCurve, size: int) -> float:
    """Returns seconds to ship ``size`` bytes; nothing takes no time."""
    return curve.fixed + curve.per_byte * size if size > 0 else 0.0


def exposed_seconds(curve: TransferCurve, size: int, last: int, hidden_s: float) -> float:
    """Returns seconds of a transfer left after the last chunk: its ``last`` bytes, and what ``hidden_s`` couldn't
    hide.

    Blocks leave while later chunks compute, for ``hidden_s`` seconds; those of the last chunk can't.
    """
    behind = max(0.0, curve.per_byte * (size - last) - hidden_s)
    return behind + transfer_seconds(curve, last)
