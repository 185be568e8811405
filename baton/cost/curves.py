"""Predicted seconds of a step, a prompt or a transfer, by a cost curve. Torch-free, pure.

Knows nothing of how a curve came about (``fit`` or ``profiles``) or of what is decided with it.
"""

from __future__ import annotations

from baton.protos.measurements import AdapterCurve, AdapterRowCounts, StepCurve, StepSample, TransferCurve


def step_features(sample: StepSample) -> tuple[float, float, float, float, float]:
    """Returns the numbers by which a StepCurve's coefficients are multiplied, in its order."""
    rows = sample.prefill_tokens + sample.draft_tokens  # a draft's row shares its sequence's keys, as a prompt's do
    return (1.0, rows, sample.prefill_attention, sample.decode_sequences, sample.decode_context)


def step_seconds(curve: StepCurve, sample: StepSample) -> float:
    """Returns the predicted seconds of one engine step of the sample's shape; its own ``seconds`` is ignored."""
    return (
        curve.fixed
        + curve.prefill_token * (sample.prefill_tokens + sample.draft_tokens)
        + curve.prefill_pair * sample.prefill_attention
        + curve.decode_sequence * sample.decode_sequences
        + curve.decode_context_token * sample.decode_context
    )


def adapter_features(adapted: AdapterRowCounts | None) -> tuple[float, float]:
    """Returns the numbers by which ``row`` and ``adapter`` of an AdapterCurve are multiplied."""
    return (0.0, 0.0) if adapted is None else (adapted.row_ranks, adapted.adapter_ranks)


def adapter_seconds(curve: AdapterCurve | None, adapted: AdapterRowCounts | None) -> float:
    """Returns the predicted seconds that the adapters of a step add to it; 0 where their cost isn't known."""
    if curve is None:
        return 0.0
    row_ranks, adapter_ranks = adapter_features(adapted)
    return curve.row * row_ranks + curve.adapter * adapter_ranks


def prefill_seconds(curve: StepCurve, uncached: int, cached: int = 0, chunk_tokens: int = 512) -> float:
    """Returns the predicted seconds to prefill ``uncached`` tokens after ``cached`` ones, alone, in chunks of
    ``chunk_tokens``.
    """
    if uncached <= 0:
        return 0.0
    chunks = -(-uncached // chunk_tokens)
    attention = uncached * (cached + uncached / 2)  # the sum over chunks telescopes to the whole
    return chunks * curve.fixed + curve.prefill_token * uncached + curve.prefill_pair * attention


def decode_seconds(curve: StepCurve, sequences: int, context: int) -> float:
    """Returns the predicted seconds of a decode step for ``sequences`` sequences with ``context`` KV tokens in
    all.
    """
    return step_seconds(curve, StepSample(0, 0.0, sequences, context, 0.0))


def transfer_seconds(curve: TransferCurve, size: int) -> float:
    """Returns the predicted seconds to ship ``size`` bytes; 0 for none."""
    return curve.fixed + curve.per_byte * size if size > 0 else 0.0


def exposed_seconds(curve: TransferCurve, size: int, last: int, hidden_s: float) -> float:
    """Returns the seconds of a transfer of ``size`` bytes that remain after prefill: those of its ``last`` bytes,
    and what didn't fit before.

    Blocks of earlier chunks are sent while later ones compute, for ``hidden_s`` seconds.
    """
    behind = max(0.0, curve.per_byte * (size - last) - hidden_s)
    return behind + transfer_seconds(curve, last)
