"""Cost curves fitted online to measurements: non-negative least squares on relative errors, old samples fading.

Knows nothing of workers or of messages. Each sample counts by its relative error, so a 2 ms step teaches as much as
a 2 s one, and one that took many times the prediction (a hiccup) has a bounded influence. Coefficients of which the
samples say nothing keep what was learned earlier, or a prior that is scaled to the machine's speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from baton.cost.curves import adapter_features, step_features
from baton.protos.measurements import AdapterCurve, AdapterRowCounts, StepCurve, StepSample, TransferCurve

PRIOR_STEP = StepCurve(2e-3, 5e-5, 1e-9, 2e-4, 1e-7)
PRIOR_TRANSFER = TransferCurve(1e-3, 1e-9)
# Seconds per rank, of a row on an adapter and of an adapter in a step; rather too long, because the ridge holds
# back what is many times its prior.
PRIOR_ADAPTERS = (1e-5, 1e-3)
LEAST_STEP_S = 1e-6  # seconds of the shortest step
LEAST_OF_EACH = 32  # steps with adapters, and without, before what adapters add is told apart from the rest
STEP_MEMORY = 512  # mean age of the steps in a fit, in steps
TRANSFER_MEMORY = 64  # mean age of the transfers in a fit, in transfers

_RIDGE = 1e-3  # of one sample, for each coefficient
_JITTER = 1e-9  # keeps terms that always come together apart
_WARM = 8  # samples before a prediction is trusted to weigh others
_SOLVE_EVERY = 32  # measurements between two fits
_OUTLIER = 3.0  # times the prediction
_DRIFT_SAMPLES = 32  # a prediction that was off by _DRIFT over these
_DRIFT = math.log(1.5)  # means that the machine changed:
_DRIFT_KEEP = 0.9  # old samples then fade this fast
_LEARNED = 0.05  # a coefficient counts as learned once it explained so much of one sample's time in all

Vector = NDArray[np.float64]


class _Fit:
    """Coefficients >= 0 of ``seconds = x . c``; ``memory`` is the samples' mean age, in samples."""

    def __init__(self, prior: Sequence[float], memory: int) -> None:
        self.samples = 0
        self._prior = np.array(prior, np.float64)
        self._keep = 1.0 - 1.0 / memory
        self._moments = np.zeros((len(prior), len(prior)))
        self._cross = np.zeros(len(prior))
        self._log_speed = 0.0
        self._drift = 0.0
        self._explained = np.zeros(len(prior))
        self._coefficients = self._prior
        self._stale = 0

    def observe(self, features: Sequence[float], seconds: float, known: bool = True) -> None:
        """One measurement; nonsense (not finite, not positive) is passed over. Unless its terms are ``known``, it
        isn't compared with a prediction.
        """
        if not (math.isfinite(seconds) and seconds > 0.0 and min(features) >= 0 and math.isfinite(sum(features))):
            return
        x = np.array(features, np.float64)
        self.samples += 1
        self._note_speed(x, seconds)
        x, y = x / (reference := self._reference(x, seconds, known)), seconds / reference
        keep = self._keep if abs(self._drift) < _DRIFT else _DRIFT_KEEP
        self._moments *= keep
        self._moments += np.multiply.outer(x, x)
        self._cross *= keep
        self._cross += x * y
        self._stale += 1
        if self._stale >= _SOLVE_EVERY or self.samples <= _WARM:
            self._solve()

    def with_terms(self, prior: Sequence[float]) -> _Fit:
        """Returns a fit that goes on from these samples, in which the further terms of ``prior`` were 0."""
        found = _Fit((*self._prior, *prior), round(1.0 / (1.0 - self._keep)))
        known = len(self._prior)
        found.samples, found._log_speed, found._drift = self.samples, self._log_speed, self._drift
        found._moments[:known, :known], found._cross[:known] = self._moments, self._cross
        found._explained[:known] = self._explained
        found._solve()  # which scales the further terms to the machine's speed
        return found

    def coefficients(self) -> list[float]:
        """Returns the best estimate of the coefficients by now."""
        if self._stale:
            self._solve()
        return [float(c) for c in self._coefficients]

    def _note_speed(self, x: Vector, seconds: float) -> None:
        guess = float(x @ self._prior)
        if guess > 0:
            weight = max(1.0 / self.samples, 1.0 - self._keep)
            self._log_speed += weight * (math.log(seconds / guess) - self._log_speed)

    def _reference(self, x: Vector, seconds: float, known: bool) -> float:
        """Returns the seconds that the sample's error is measured against."""
        if self.samples <= _WARM or not known:
            return seconds
        predicted = float(x @ self._coefficients)
        self._note_drift(seconds, predicted)
        return max(predicted, seconds / _OUTLIER)

    def _note_drift(self, seconds: float, predicted: float) -> None:
        """Follow how far predictions have been off lately, as a logarithm."""
        off = math.log(seconds / predicted) if predicted > 0 else _DRIFT
        self._drift += (min(2.0, max(-2.0, off)) - self._drift) / _DRIFT_SAMPLES

    def _solve(self) -> None:
        scale = self._prior * math.exp(min(50.0, max(-50.0, self._log_speed)))
        centre = np.where(self._explained > _LEARNED, self._coefficients, scale) / scale
        square = self._moments * np.outer(scale, scale) + _RIDGE * np.eye(len(scale))
        linear = self._cross * scale + _RIDGE * centre
        self._coefficients = _non_negative(square, linear) * scale
        self._explained = np.maximum(self._explained, self._coefficients**2 * self._moments.diagonal())
        self._stale = 0


def _non_negative(square: Vector, linear: Vector) -> Vector:
    """Returns argmin of u.square.u / 2 - linear.u over u >= 0, exactly, for positive definite ``square``.

    The set of positive coefficients is found by block principal pivoting (Portugal, Júdice, Vicente 1994), which
    takes a solution or two; in the rare case that it doesn't end, every set is tried.
    """
    size = np.sqrt(square.diagonal())
    square = square / np.outer(size, size) + _JITTER * np.eye(len(size))
    linear = linear / size
    positive = np.ones(len(linear), np.bool_)
    for _ in range(4 * len(linear)):
        found = _on(positive, square, linear)
        wrong = np.where(positive, found < 0, linear - square @ found > 0)
        if not wrong.any():
            return found / size
        positive ^= wrong
    return _of_all_sets(square, linear) / size


def _on(positive: NDArray[np.bool_], square: Vector, linear: Vector) -> Vector:
    """Returns the unconstrained minimum over the coefficients that ``positive`` marks; the others are 0."""
    found, some = np.zeros(len(linear)), positive.nonzero()[0]
    found[some] = np.linalg.solve(square[some[:, None], some], linear[some])
    return found


def _of_all_sets(square: Vector, linear: Vector) -> Vector:
    best, found = 0.0, np.zeros(len(linear))
    for count in range(1, len(linear) + 1):
        for chosen in combinations(range(len(linear)), count):
            positive = np.isin(np.arange(len(linear)), chosen)
            tried = _on(positive, square, linear)
            value = -float(linear @ tried) / 2
            if value < best and (tried >= 0).all():
                best, found = value, tried
    return found


class StepFit:
    """Fits one worker's StepCurve to its measured steps; ``memory`` is the mean age of samples, in samples."""

    def __init__(self, prior: StepCurve = PRIOR_STEP, memory: int = STEP_MEMORY) -> None:
        self._fit = _Fit([getattr(prior, name) for name in StepCurve.__struct_fields__], memory)

    def observe(self, sample: StepSample) -> None:
        """Adds one measured step to the estimate; a nonsensical one is ignored."""
        self._fit.observe(step_features(sample), sample.seconds)

    @property
    def samples(self) -> int:
        """Returns the number of steps added."""
        return self._fit.samples

    @property
    def curve(self) -> StepCurve | None:
        """Returns the estimate, whose ``fixed`` is at least LEAST_STEP_S; None before the first step."""
        if not self._fit.samples:
            return None
        fixed, *others = self._fit.coefficients()
        return StepCurve(max(fixed, LEAST_STEP_S), *others)


class AdaptedStepFit(StepFit):
    """Fits a StepCurve as ``StepFit`` does, and apart from it what LoRA adapters add to steps.

    ``curve`` has their cost in it, by the adapters that steps have had lately; ``bare`` hasn't.
    """

    def __init__(self, prior: StepCurve = PRIOR_STEP, memory: int = STEP_MEMORY) -> None:
        super().__init__(prior, memory)
        self._adapted: _Fit | None = None  # from the first step with adapters on
        self._steps = 0  # with adapters
        self._keep = 1.0 - 1.0 / memory
        self._rows = self._row_ranks = 0.0  # old ones fading as samples do

    def observe(self, sample: StepSample) -> None:
        """Adds one measured step to both estimates; a nonsensical one is ignored."""
        before, adapted = self.samples, sample.adapted
        if adapted is not None:
            self._adapted = self._adapted or self._fit.with_terms(PRIOR_ADAPTERS)
        super().observe(sample)
        if self.samples == before or self._adapted is None:
            return
        if adapted is not None:
            self._count(adapted)
        known = adapted is None or self._steps > LEAST_OF_EACH
        self._adapted.observe((*step_features(sample), *adapter_features(adapted)), sample.seconds, known)

    def _count(self, adapted: AdapterRowCounts) -> None:
        self._steps += 1
        self._rows = self._keep * self._rows + adapted.rows
        self._row_ranks = self._keep * self._row_ranks + adapted.row_ranks

    @property
    def adapters(self) -> AdapterCurve | None:
        """Returns what adapters add; None before LEAST_OF_EACH steps with adapters and as many without."""
        found = self._apart()
        return None if found is None else AdapterCurve(found[-2], found[-1], self._row_ranks / max(1.0, self._rows))

    @property
    def bare(self) -> StepCurve | None:
        """Returns the estimate for steps without adapters; None where ``adapters`` is."""
        found = self._apart()
        return None if found is None else StepCurve(max(found[0], LEAST_STEP_S), *found[1:-2])

    def _apart(self) -> list[float] | None:
        if self._adapted is None or min(self._steps, self.samples - self._steps) < LEAST_OF_EACH:
            return None
        return self._adapted.coefficients()


class TransferFit:
    """Fits one worker's TransferCurve to its measured KV transfers; ``memory`` is the mean age of samples, in
    samples.
    """

    def __init__(self, prior: TransferCurve = PRIOR_TRANSFER, memory: int = TRANSFER_MEMORY) -> None:
        self._fit = _Fit([prior.fixed, prior.per_byte], memory)

    def observe(self, size: int, seconds: float) -> None:
        """Adds a transfer of ``size`` bytes that took ``seconds`` to the estimate."""
        self._fit.observe((1.0, float(size)), seconds)

    @property
    def samples(self) -> int:
        """Returns the number of transfers added."""
        return self._fit.samples

    @property
    def curve(self) -> TransferCurve | None:
        """Returns the estimate; None before the first transfer."""
        return TransferCurve(*self._fit.coefficients()) if self._fit.samples else None
