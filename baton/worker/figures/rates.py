"""Rates over the last seconds, computed from totals: tokens per second, the share of time in steps, MFU and MBU.

Knows nothing of engines or metrics. Totals come when something happens; a rate falls when nothing does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from baton.protos.channel import Stats
from baton.protos.measurements import EngineWork

OVER_S = 5.0  # seconds that a rate looks back: a few reports, so that it neither jumps nor lags
BUSY = "busy"  # the total of seconds in steps: what a long step brings is spread over that step
KEPT = 256  # totals at most, more than come in OVER_S


class Rates:
    """Turns totals into rates over the last ``over_s`` seconds. ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float], over_s: float = OVER_S) -> None:
        self._clock, self._over_s = clock, over_s
        self._seen: deque[tuple[float, dict[str, float]]] = deque()

    def now(self, totals: Mapping[str, float]) -> None:
        """Records the totals, by name, at the present time."""
        self._seen.append((self._clock(), dict(totals)))
        while len(self._seen) > KEPT:
            self._seen.popleft()

    def per_second(self) -> dict[str, float]:
        """Returns the rate per second of each total, by name; {} before there is a total."""
        now = self._clock()
        while len(self._seen) > 1 and self._seen[1][0] <= now - self._over_s:
            self._seen.popleft()
        if not self._seen:
            return {}
        (since, first), (until, last) = self._seen[0], self._seen[-1]
        spent = last.get(BUSY, 0.0) - first.get(BUSY, 0.0)
        elapsed = max(min(now - since, max(self._over_s, spent + now - until)), 1e-3)
        return {name: max(0.0, total - first.get(name, 0.0)) / elapsed for name, total in last.items()}


def work_totals(stats: Stats, work: EngineWork | None) -> dict[str, float]:
    """Returns an engine's totals by name; FLOPs and bytes only if the cost of a step is known."""
    totals = {
        "prefill_tokens": float(stats.tokens_prefilled),
        "decode_tokens": float(stats.tokens_decoded),
        BUSY: stats.busy_seconds,
    }
    if work is not None:
        totals["flops"] = flops(stats, work)
        totals["bytes"] = bytes_read(stats, work)
    return totals


def flops(stats: Stats, work: EngineWork) -> float:
    """Returns the floating-point operations of all steps so far."""
    tokens = stats.tokens_prefilled + stats.tokens_decoded
    pairs = stats.prefill_pairs + stats.decode_context
    return tokens * work.token_flops + stats.tokens_decoded * work.sample_flops + pairs * work.pair_flops


def bytes_read(stats: Stats, work: EngineWork) -> float:
    """Returns the bytes that all steps so far read: the weights in each step, and the decoded sequences'
    context; layers with a window read at most that of it, counted by the mean context.
    """
    context = stats.decode_context / max(1, stats.tokens_decoded)
    windowed = sum(min(window, context) * size for window, size in work.windows)
    return (
        stats.step * work.step_bytes + stats.decode_context * work.context_bytes + stats.tokens_decoded * windowed
    )
