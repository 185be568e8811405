"""Fitting curves from noisy measurements."""

from __future__ import annotations

import math
import random
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cost.curves import decode_seconds, prefill_seconds, step_seconds
from baton.cost.fit import PRIOR_STEP, StepFit, TransferFit, _non_negative, _of_all_sets
from baton.cost.profiles import load_profile
from baton.protos.measurements import StepCurve, StepSample

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
