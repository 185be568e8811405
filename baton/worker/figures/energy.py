"""Energy use of this machine in joules: RAPL counters of its processors, NVML of its GPUs, where they are readable.

Knows nothing of workers. The energy is the whole machine's: sums over workers must count each host once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

RAPL = Path("/sys/class/powercap")
JouleCounter = Callable[[], float | None]


class Energy:
    """Counts joules by source since construction; no sources where the counters are hidden, as in many
    containers.
    """

    def __init__(self, rapl: Path = RAPL, gpus: Callable[[], list[JouleCounter]] | None = None) -> None:
        packages = [_Rapl(path) for path in sorted(rapl.glob("intel-rapl:[0-9]*")) if path.name.count(":") == 1]
        self._reads: dict[str, list[JouleCounter]] = {
            "rapl": [p.joules for p in packages if p.joules() is not None],
            "nvml": (nvml if gpus is None else gpus)(),
        }
        self._before = {source: _sum(reads) for source, reads in self._reads.items() if reads}

    def joules(self) -> dict[str, float]:
        """Returns the joules used since construction, by source ("rapl", "nvml")."""
        return {source: max(0.0, _sum(self._reads[source]) - before) for source, before in self._before.items()}


class _Rapl:
    """One package's counter, which wraps."""

    def __init__(self, folder: Path) -> None:
        self._file, self._wraps = folder / "energy_uj", 0
        self._range = _number(folder / "max_energy_range_uj") or 0
        self._last = 0

    def joules(self) -> float | None:
        found = _number(self._file)
        if found is None:
            return None
        if found < self._last:
            self._wraps += 1
        self._last = found
        return (found + self._wraps * self._range) / 1e6


def nvml() -> list[JouleCounter]:
    """Returns a function per GPU that reads its energy counter in joules; [] without NVML or a GPU."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
    except (OSError, AttributeError):
        return []
    reads = [_gpu(library, i) for i in range(count.value)]
    return [read for read in reads if read() is not None]


def _gpu(library: ctypes.CDLL, index: int) -> JouleCounter:
    handle = ctypes.c_void_p()
    failed = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))

    def read() -> float | None:
        millijoules = ctypes.c_ulonglong()
        if failed or library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
            return None
        return millijoules.value / 1e3

    return read


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _sum(reads: list[JouleCounter]) -> float:
    return sum(found for read in reads if (found := read()) is not None)
