"""Seconds of GPU work: calls captured into a graph, so that no launch waits for the host, timed by events.

Knows nothing of what is called. A measurement takes several variants of its call that work on inputs of their own,
more of them than the L2 cache holds, and goes round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from bench.cuda.extent import used
from bench.cuda.rows import Sample

SAMPLES, SAMPLE_S = 24, 0.002
MOST_CALLS = 4096

Call = Callable[[], object]


def variants(nbytes: float) -> int:
    """Returns how many inputs of ``nbytes`` bytes together exceed the L2 cache, 2 to 64."""
    return max(2, min(64, -(-used().past_l2 // max(1, int(nbytes)))))


def stream() -> int:
    """The stream that work belongs on now: the capturing one while a graph is made."""
    return torch.cuda.current_stream().cuda_stream if used().device == "cuda" else 0


def wait() -> None:
    """Until the GPU is done."""
    if used().device == "cuda":
        torch.cuda.synchronize()


def measure(calls: Sequence[Call], samples: int = SAMPLES) -> Sample:
    """Seconds of one call, by a graph of them."""
    if used().device != "cuda":
        return _once(calls[:1])
    once = _seconds(calls, 1, 1)[0]
    repeats = max(1, min(MOST_CALLS // len(calls), int(SAMPLE_S / max(once * len(calls), 1e-7))))
    return Sample(tuple(_seconds(calls, repeats, samples)))


def launched(call: Call, samples: int = SAMPLES, repeats: int = 5) -> Sample:
    """Seconds of a call that launches by itself and waits for the GPU: host time counts."""
    if used().device != "cuda":
        return _once([call])
    call()
    wait()
    found = []
    for _ in range(samples):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        found.append((time.perf_counter() - begin) / repeats)
    return Sample(tuple(found))


def _once(calls: Sequence[Call]) -> Sample:
    begin = time.perf_counter()
    for call in calls:
        call()
    return Sample(((time.perf_counter() - begin) / len(calls),) * 2)


def _seconds(calls: Sequence[Call], repeats: int, samples: int) -> list[float]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:  # workspaces grow, libraries tune themselves
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    found = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / (repeats * len(calls)))
    return found
