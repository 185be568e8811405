"""Fitting curves from noisy measurements."""

from __future__ import annotations

import math
import random
from statistics import median

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cost.curves import adapter_seconds, decode_seconds, prefill_seconds, step_seconds
from baton.cost.fit import (
    LEAST_OF_EACH,
    PRIOR_STEP,
    AdaptedStepFit,
    StepFit,
    TransferFit,
    _non_negative,
    _of_all_sets,
)
from baton.cost.profiles import load_profile
from baton.protos.measurements import AdapterCurve, AdapterRowCounts, StepCurve, StepSample

PROFILES = ["laptop", "h100-llama3-8b", "a100-llama3-70b", "l4-llama3-8b"]


def mixed(rng: random.Random) -> StepSample:
    """A step as a busy worker runs it: sometimes a chunk, mostly decodes."""
    new, sequences = rng.choice((0, 0, 64, 512)), rng.randint(1, 64)
    return StepSample(
        new, new * (rng.randint(0, 4000) + new / 2), sequences, sequences * rng.randint(10, 2000), 0.0
    )


def reading(rng: random.Random) -> StepSample:
    new = rng.randint(1, 512)
    return StepSample(new, new * (rng.randint(0, 4000) + new / 2), 0, 0, 0.0)


def timed(sample: StepSample, seconds: float) -> StepSample:
    return StepSample(
        sample.prefill_tokens,
        sample.prefill_attention,
        sample.decode_sequences,
        sample.decode_context,
        seconds,
    )


def noise(rng: random.Random) -> float:
    """10% either way, and now and then a hiccup of ten times."""
    return rng.lognormvariate(0.0, 0.1) * (10.0 if rng.random() < 0.01 else 1.0)


def error(fitted: StepCurve | None, true: StepCurve, rng: random.Random) -> float:
    """The median relative error over other steps."""
    assert fitted is not None
    steps = [mixed(rng) for _ in range(200)]
    return median(abs(step_seconds(fitted, s) / step_seconds(true, s) - 1) for s in steps)


def watch(fit: StepFit, true: StepCurve, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        sample = mixed(rng)
        fit.observe(timed(sample, step_seconds(true, sample) * noise(rng)))


@pytest.mark.parametrize("name", PROFILES)
def test_a_fit_predicts_steps_from_noisy_ones(name: str) -> None:
    rng, fit, true = random.Random(name), StepFit(), load_profile(name).step
    watch(fit, true, rng, 1000)
    assert error(fit.curve, true, rng) < 0.06


@pytest.mark.parametrize("name", PROFILES)
def test_a_few_steps_already_tell_the_scale(name: str) -> None:
    rng, fit, true = random.Random(name), StepFit(), load_profile(name).step
    watch(fit, true, rng, 20)
    assert error(fit.curve, true, rng) < 0.3


def adapted(rng: random.Random, sample: StepSample) -> StepSample:
    """The step with some of its sequences on adapters of ranks 8 and 32."""
    count = rng.randint(1, min(8, sample.decode_sequences))
    ranks = [rng.choice((8, 32)) for _ in range(count)]
    rows = [rng.randint(1, max(1, sample.decode_sequences // count)) for _ in range(count)]
    row_ranks = sum(n * rank for n, rank in zip(rows, ranks, strict=True))
    return msgspec.structs.replace(sample, adapted=AdapterRowCounts(sum(rows), row_ranks, count, sum(ranks)))


@pytest.mark.parametrize("name", PROFILES)
def test_what_adapters_add_is_told_apart_from_the_rest_of_a_step(name: str) -> None:
    rng, fit, true = random.Random(name), AdaptedStepFit(), load_profile(name).step
    usual = step_seconds(true, StepSample(0, 0.0, 16, 16_000, 0.0))
    added = AdapterCurve(0.1 * usual / (16 * 20), 0.1 * usual / (8 * 20), 20.0)
    for at in range(1500):
        sample = mixed(rng) if at % 2 else adapted(rng, mixed(rng))
        seconds = step_seconds(true, sample) + adapter_seconds(added, sample.adapted)
        fit.observe(msgspec.structs.replace(sample, seconds=seconds * noise(rng)))
    found = fit.adapters
    assert found is not None
    assert 8 < found.rank < 32
    steps = [adapted(rng, mixed(rng)) for _ in range(200)]
    off = [adapter_seconds(found, s.adapted) / adapter_seconds(added, s.adapted) - 1 for s in steps]
    assert abs(median(off)) < 0.2
    assert error(fit.bare, true, rng) < 0.06
    assert fit.curve is not None
    assert median(step_seconds(fit.curve, s) / step_seconds(true, s) for s in steps) > 1.02  # it has some of them


def test_of_adapters_nothing_is_claimed_before_steps_with_and_without_were_seen() -> None:
    rng, fit = random.Random(1), AdaptedStepFit()
    true, added = load_profile("laptop").step, AdapterCurve(1e-6, 1e-5, 0.0)

    def see(sample: StepSample) -> None:
        seconds = step_seconds(true, sample) + adapter_seconds(added, sample.adapted)
        fit.observe(msgspec.structs.replace(sample, seconds=seconds))

    for _ in range(LEAST_OF_EACH):
        see(mixed(rng))
    assert (fit.adapters, fit.bare) == (None, None)
    for _ in range(LEAST_OF_EACH - 1):
        see(adapted(rng, mixed(rng)))
    assert (fit.adapters, fit.bare) == (None, None)
    see(adapted(rng, mixed(rng)))
    assert fit.adapters is not None
    assert fit.bare is not None


@pytest.mark.parametrize("rank", [8, 64])
def test_what_one_adapter_adds_is_found_however_low_its_rank(rank: int) -> None:
    rng, fit, true = random.Random(rank), AdaptedStepFit(), load_profile("h100-llama3-8b").step
    usual = step_seconds(true, StepSample(0, 0.0, 32, 32_000, 0.0))
    added = AdapterCurve(0.2 * usual / (32 * rank), 0.1 * usual / rank, 0.0)
    for at in range(900):
        sample = mixed(rng)
        if at >= 600:
            rows = sample.decode_sequences
            sample = msgspec.structs.replace(sample, adapted=AdapterRowCounts(rows, rows * rank, 1, rank))
        seconds = step_seconds(true, sample) + adapter_seconds(added, sample.adapted)
        fit.observe(msgspec.structs.replace(sample, seconds=seconds * noise(rng)))
    found = fit.adapters
    assert found is not None
    assert 0.8 < found.row / added.row < 1.25
    assert 0.8 < found.adapter / added.adapter < 1.25
    assert error(fit.bare, true, rng) < 0.05


def test_the_rank_is_that_of_rows_lately_and_nonsense_counts_for_nothing() -> None:
    rng, fit = random.Random(2), AdaptedStepFit(memory=32)

    def see(count: int, rank: int, seconds: float) -> None:
        for _ in range(count):
            counts = AdapterRowCounts(4, 4 * rank, 1, rank)
            fit.observe(msgspec.structs.replace(mixed(rng), adapted=counts, seconds=seconds))

    for _ in range(LEAST_OF_EACH):
        fit.observe(timed(mixed(rng), 0.01))
    see(LEAST_OF_EACH, 8, math.nan)
    assert fit.adapters is None
    see(LEAST_OF_EACH, 8, 0.02)
    assert fit.adapters is not None
    assert fit.adapters.rank == pytest.approx(8)
    see(300, 64, 0.02)
    assert fit.adapters.rank == pytest.approx(64, rel=0.01)


def test_a_machine_that_slows_down_is_followed() -> None:
    rng, fit, true = random.Random(3), StepFit(), load_profile("h100-llama3-8b").step
    watch(fit, true, rng, 1000)
    slow = StepCurve(*(10 * getattr(true, name) for name in StepCurve.__struct_fields__))
    watch(fit, slow, rng, 2500)
    assert error(fit.curve, slow, rng) < 0.1
    watch(fit, true, rng, 2500)
    assert error(fit.curve, true, rng) < 0.1


def test_a_prefill_worker_learns_prompts_from_prompts_alone() -> None:
    rng, fit, true = random.Random(4), StepFit(), load_profile("a100-llama3-70b").step
    for _ in range(800):
        sample = reading(rng)
        fit.observe(timed(sample, step_seconds(true, sample) * noise(rng)))
    assert fit.curve is not None
    for uncached in (64, 512, 4000):
        assert prefill_seconds(fit.curve, uncached) == pytest.approx(prefill_seconds(true, uncached), rel=0.1)
    assert decode_seconds(fit.curve, 8, 8000) > fit.curve.fixed, "what was never seen keeps a scaled prior"


def test_what_was_learned_survives_a_long_time_without_samples_of_its_kind() -> None:
    rng, fit, true = random.Random(5), StepFit(), load_profile("h100-llama3-8b").step
    watch(fit, true, rng, 1000)
    for _ in range(6000):
        sample = StepSample(0, 0.0, 16, rng.randint(1000, 20_000), 0.0)
        fit.observe(timed(sample, step_seconds(true, sample) * noise(rng)))
    assert fit.curve is not None
    assert prefill_seconds(fit.curve, 4000) == pytest.approx(prefill_seconds(true, 4000), rel=0.15)


def test_before_the_first_sample_nothing_is_claimed() -> None:
    assert StepFit().curve is None
    assert TransferFit().curve is None


def test_a_transfer_fit_finds_latency_and_bandwidth() -> None:
    rng, fit = random.Random(6), TransferFit()
    for _ in range(300):
        size = rng.randint(1, 200) << 16
        fit.observe(size, (2e-3 + size * 5e-10) * noise(rng))
    assert fit.curve is not None
    assert fit.curve.fixed == pytest.approx(2e-3, rel=0.3)
    assert fit.curve.per_byte == pytest.approx(5e-10, rel=0.2)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_passed_over(bad: float) -> None:
    fit, transfer = StepFit(), TransferFit()
    fit.observe(StepSample(1, 1.0, 1, 1, bad))
    fit.observe(StepSample(1, math.nan, 1, 1, 1.0))
    transfer.observe(1, bad)
    assert fit.samples == transfer.samples == 0


SAMPLES = st.builds(
    StepSample,
    st.integers(0, 10**5),
    st.floats(0, 1e12),
    st.integers(0, 10**4),
    st.integers(0, 10**8),
    st.floats(1e-9, 1e6),
)


@given(st.lists(SAMPLES, min_size=1, max_size=80))
def test_whatever_is_measured_a_curve_is_finite_and_never_negative(samples: list[StepSample]) -> None:
    fit = StepFit(memory=16)
    for sample in samples:
        fit.observe(sample)
    curve = fit.curve
    assert curve is not None
    values = [getattr(curve, name) for name in StepCurve.__struct_fields__]
    assert all(math.isfinite(value) and value >= 0.0 for value in values)
    assert step_seconds(curve, samples[-1]) > 0.0


def test_exact_samples_of_the_prior_leave_the_prior() -> None:
    rng, fit = random.Random(8), StepFit()
    for _ in range(100):
        sample = mixed(rng)
        fit.observe(timed(sample, step_seconds(PRIOR_STEP, sample)))
    assert error(fit.curve, PRIOR_STEP, rng) < 1e-6


def test_the_coefficients_are_those_that_every_set_of_positive_ones_tried_in_turn_gives() -> None:
    rng = np.random.default_rng(0)
    for size in [1, 2, 3, 4, 5] * 20:
        rows = rng.normal(size=(rng.integers(1, 9), size))
        square, linear = rows.T @ rows + 1e-3 * np.eye(size), rows.T @ rng.normal(size=len(rows))
        found = _non_negative(square, linear)
        assert (found >= 0).all()
        assert np.allclose(found, _of_all_sets(square, linear), atol=1e-6)
