"""Statistics of a trace: lengths, arrivals, reuse, and how the demand for prefill and decode varies. Pure.

Knows nothing of hardware: the demand ratio is input tokens to be computed over output tokens, per window.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from baton.planner.figures import Distribution, distribution
from baton.planner.traces.trace import Trace, TraceRequest


class Lengths(msgspec.Struct, frozen=True):
    """Summarizes the input and output tokens per request."""

    input: Distribution
    output: Distribution
    input_max: int
    output_max: int


class Arrivals(msgspec.Struct, frozen=True):
    """Describes arrivals; ``burstiness`` is the variance over the mean of requests per second (Poisson: 1)."""

    requests: int
    duration_s: float
    per_second: float
    peak_per_second: float
    burstiness: float


class Reuse(msgspec.Struct, frozen=True):
    """Holds the shares of prompt tokens, and of requests, that would find a cached prefix if the cache forgot
    nothing.
    """

    token_hit_rate: float
    request_hit_rate: float
    distinct_blocks: int


class Window(msgspec.Struct, frozen=True):
    """Describes one window of the trace.

    ``ratio`` is input over output tokens, ``uncached_ratio`` counts only input that no cache would hold.
    """

    start_s: float
    requests: int
    input_tokens: int
    uncached_tokens: int
    output_tokens: int
    ratio: float
    uncached_ratio: float


class TraceStats(msgspec.Struct, frozen=True):
    """Holds all statistics of a trace; ``ratio`` is input over output tokens, ``ratio_spread`` the highest window's
    ratio over the lowest's.

    ``reuse`` is None if the trace has no hashes.
    """

    source: str
    skipped: int
    lengths: Lengths
    arrivals: Arrivals
    reuse: Reuse | None
    windows: tuple[Window, ...]
    ratio: float
    ratio_spread: float


def stats(trace: Trace, window_s: float = 60.0) -> TraceStats:
    """Returns the statistics of a trace, in windows of ``window_s`` seconds."""
    found = cached_tokens(trace)
    windows = tuple(_windows(trace, found, window_s))
    ratios = [w.ratio for w in windows if w.ratio > 0]
    inputs = sum(r.input_length for r in trace.requests)
    return TraceStats(
        source=trace.source,
        skipped=len(trace.skipped),
        lengths=_lengths(trace.requests),
        arrivals=_arrivals(trace),
        reuse=_reuse(trace, found) if trace.has_hashes else None,
        windows=windows,
        ratio=inputs / max(1, sum(r.output_length for r in trace.requests)),
        ratio_spread=max(ratios) / min(ratios) if ratios else 1.0,
    )


def cached_tokens(trace: Trace) -> list[int]:
    """Returns, per request, the prompt tokens that an unlimited cache would hold when it arrives."""
    seen: set[tuple[int, int]] = set()
    found = []
    for request in trace.requests:
        held, blocks = 0, [(request.adapter, block) for block in request.hash_ids]
        for block in blocks:
            if block not in seen:
                break
            held += 1
        found.append(min(held * trace.block_tokens, request.input_length))
        seen.update(blocks)
    return found


def _lengths(requests: tuple[TraceRequest, ...]) -> Lengths:
    inputs, outputs = [r.input_length for r in requests], [r.output_length for r in requests]
    return Lengths(distribution(inputs), distribution(outputs), max(inputs), max(outputs))


def _arrivals(trace: Trace) -> Arrivals:
    counts = Counter(int(request.arrival) for request in trace.requests).values()  # of seconds in which any arrive
    seconds = int(trace.duration) + 1
    mean = len(trace.requests) / seconds
    variance = max(0.0, sum(c * c for c in counts) / seconds - mean * mean)
    return Arrivals(len(trace.requests), trace.duration, mean, max(counts), variance / mean)


def _reuse(trace: Trace, found: list[int]) -> Reuse:
    inputs = sum(r.input_length for r in trace.requests)
    blocks = {(r.adapter, block) for r in trace.requests for block in r.hash_ids}
    return Reuse(sum(found) / inputs, sum(f > 0 for f in found) / len(found), len(blocks))


def _windows(trace: Trace, found: list[int], window_s: float) -> list[Window]:
    groups: dict[int, list[tuple[TraceRequest, int]]] = {}
    for request, held in zip(trace.requests, found, strict=True):
        groups.setdefault(int(request.arrival / window_s), []).append((request, held))
    return [_window(i * window_s, groups[i]) for i in sorted(groups)]


def _window(start: float, members: list[tuple[TraceRequest, int]]) -> Window:
    inputs = sum(r.input_length for r, _ in members)
    uncached = inputs - sum(held for _, held in members)
    outputs = sum(r.output_length for r, _ in members)
    return Window(start, len(members), inputs, uncached, outputs, inputs / outputs, uncached / outputs)
