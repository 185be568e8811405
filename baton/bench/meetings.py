"""Measures the time that two ranks (processes of one worker) take to meet at a barrier in shared memory.

Knows nothing of models or workers. ``python -m baton.bench.meetings`` prints the seconds, the median of some
rounds.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from statistics import median

from baton.kernels.abi import native
from baton.kernels.collective.native import Collective, group_at, group_bytes
from baton.process.children import child_environment, python
from baton.process.processes import die_with_parent

RANKS, SLOT_BYTES = 2, 4096  # ranks that meet, and bytes that each may bring
MEETINGS, ROUNDS = 2000, 5  # a round of this many takes some hundredths of a second
PATIENCE_S = 600.0  # for all of it, kernels' compilation included


def measured_meeting() -> float | None:
    """Returns the seconds of one barrier of two ranks, measured in new processes; None if there are no native
    kernels.
    """
    done = subprocess.run(
        python("baton.bench.meetings"), env=child_environment(), stdout=subprocess.PIPE, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return float(done.stdout) if done.returncode == 0 else None


def meeting_seconds() -> float:
    """Returns the seconds of one barrier between this process, which must have no other threads, and a fork of
    it.
    """
    region = mmap.mmap(-1, group_bytes(RANKS, SLOT_BYTES))
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    own, other = (Collective(group_at(address, rank, RANKS, SLOT_BYTES, 0.0)) for rank in range(RANKS))
    pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL)
        _meet(other, MEETINGS * (ROUNDS + 1))
        os._exit(0)
    try:
        _meet(own, MEETINGS)  # warms up
        return median(_meet(own, MEETINGS) for _ in range(ROUNDS)) / MEETINGS
    finally:
        os.waitpid(pid, 0)


def _meet(rank: Collective, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        rank.meet()
    return time.perf_counter() - began


def main() -> int:
    """Prints the measured seconds; returns exit status 1 if there are no native kernels, else 0."""
    if native.library() is None:
        return 1
    print(meeting_seconds())
    return 0


if __name__ == "__main__":
    sys.exit(main())
