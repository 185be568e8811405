"""Measured pace of the cluster: seconds from placement to first token, and seconds per output token.

Knows nothing of queues or workers. Admission asks how much of an SLO may be spent waiting; the view asks how many
sequences a decode worker may have so that p95 of the time per token stays within the SLO.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

SAMPLES = 256  # values that a quantile is taken of
FRESH_S = 30.0  # seconds after which a value counts no more
ENOUGH = 8  # values below which there is no quantile
LOOK_EVERY_S = 0.5  # seconds for which a quantile is kept, because sorting costs
# Factor by which a cap shrinks while p95 misses its SLO; sequences that it always leaves.
SHRINK, LEAST_CAP = 0.9, 2
NEAR = 2  # sequences below the cap at which a worker counts as having reached it
# Share of an SLO that may pass in the queue however slow the answers were: what finds room at once is always tried.
# Else a few slow answers, as after a start, would have an idle cluster refuse all until they are FRESH_S old.
LEAST_BUDGET = 0.1


class Quantile:
    """Keeps the 95th percentile of the last SAMPLES values that are at most FRESH_S old."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._known: float | None = None
        self._looked = float("-inf")

    def add(self, value: float) -> None:
        """Adds one value, timed now."""
        self._values.append((self._clock(), value))

    def p95(self) -> float | None:
        """Returns the 95th percentile, computed at most LOOK_EVERY_S ago; None while there are fewer than ENOUGH
        values.
        """
        now = self._clock()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            while self._values and now - self._values[0][0] > FRESH_S:
                self._values.popleft()
            values = sorted(v for _, v in self._values)
            self._known = values[int(0.95 * (len(values) - 1))] if len(values) >= ENOUGH else None
        return self._known


class _Pace:
    """The measured pace of one model: per context class, seconds from placement to first token, and the cap."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.service: dict[str, Quantile] = {}
        self.excess = Quantile(clock)
        self.cap: float | None = None
        self._adjusted = float("-inf")

    def adjust(self, most: int) -> None:
        """Additive increase, multiplicative decrease: a tenth less when p95 is over its SLO, else one more.

        A cap that a worker didn't reach stays, as a congestion window does that isn't used (RFC 7661): one that
        grew through hours of light load would hold nobody back when it has to.
        """
        now, p95 = self._clock(), self.excess.p95()
        if p95 is None or now - self._adjusted < LOOK_EVERY_S:
            return
        self._adjusted = now
        if p95 > 1.0:
            self.cap = max(LEAST_CAP, (self.cap or most) * SHRINK)
        elif self.cap is not None and most + NEAR >= self.cap:
            self.cap += 1


class Throttle:
    """Limits waiting times and batch sizes by the measured pace of recent answers, of each model by itself."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paces: dict[str, _Pace] = {}

    def answered(
        self, pool: str, context_class: str, service_s: float | None, tpot_s: float, slo_tpot_s: float, most: int
    ) -> None:
        """Takes the figures of an answer of model ``pool``, in seconds: ``service_s`` from placement to first
        token, None if unknown, ``tpot_s`` per output token.

        ``most`` is the number of sequences that its decode worker has without it.
        """
        if pool not in self._paces:
            self._paces[pool] = _Pace(self._clock)
        pace = self._paces[pool]
        if service_s is not None:
            pace.service.setdefault(context_class, Quantile(self._clock)).add(service_s)
        if slo_tpot_s and tpot_s:
            pace.excess.add(tpot_s / slo_tpot_s)
            pace.adjust(most)

    def queue_budget(self, pool: str, context_class: str, slo_ttft_s: float) -> float:
        """Returns the seconds of ``slo_ttft_s`` that may pass in the queue: what the p95 from placement to first
        token leaves of it, and LEAST_BUDGET of it in any case.
        """
        return max(LEAST_BUDGET * slo_ttft_s, slo_ttft_s - self.service_s(pool, context_class))

    def service_s(self, pool: str, context_class: str) -> float:
        """Returns the p95 of the seconds from placement to first token; 0 where it isn't known."""
        pace = self._paces.get(pool)
        service = pace.service.get(context_class) if pace else None
        return (service.p95() or 0.0) if service else 0.0

    def cap(self, pool: str, max_batch: int) -> int:
        """Returns the number of sequences that a decode worker of the model may have, ``max_batch`` at most."""
        pace = self._paces.get(pool)
        if pace is None or pace.cap is None:
            return max_batch
        return max(LEAST_CAP, min(max_batch, int(pace.cap)))
