"""Captures work on a card as a CUDA graph, so that all its launches become one.

Knows nothing of models. A graph replays the same kernels at the same addresses: what its run reads must stay where
it is, and what it makes belongs to the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from baton.protos.errors import ConfigError

Run = Callable[[], None]
WARM = 2  # runs before a capture, by which libraries make their handles and workspaces


class Capture(Protocol):
    """Makes a replay of a run."""

    def __call__(self, run: Run) -> Run:
        """Returns what repeats the launches of ``run``, which is called some times. Raises whatever the run raises
        while it is captured, and ConfigError if the card isn't usable any more.
        """


class CudaCapture:
    """Implements ``Capture`` by torch.cuda.graph; all its graphs share memory, so that only one may run at a time,
    and none's results outlive another one's replay.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Returns the replay of ``run``."""
        try:
            return self._captured(run)
        except Exception as error:
            try:
                torch.cuda.synchronize()  # raises what a kernel did, which stays with the process
            except Exception as fault:
                text = f"device cuda: a captured step left the card unusable for this process: {fault}"
                raise ConfigError(f"{text}; start again with BATON_CHECK_STEP=1", "device") from error
            raise

    def _captured(self, run: Run) -> Run:
        beside, stream = torch.cuda.Stream(), torch.cuda.current_stream()
        beside.wait_stream(stream)
        with torch.cuda.stream(beside):
            for _ in range(WARM):
                run()
        stream.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may call the driver meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        replay: Run = graph.replay
        return replay
