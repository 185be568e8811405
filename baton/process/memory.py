"""The memory that this process may still take, by the machine and by its container's limit.

Knows nothing of who asks. Everything is read from /proc and /sys.
"""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # version 2, as containers see their own


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Returns the bytes that this process can take without swapping or exceeding its container's limit.

    ``meminfo`` and ``cgroup`` (version 2) are where that is read.
    """
    machine = _fields(meminfo.read_text().replace(":", ""), 1 << 10)["MemAvailable"]
    try:
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        reclaimable = _fields((cgroup / "memory.stat").read_text(), 1)["inactive_file"]
    except (OSError, ValueError, KeyError):  # no cgroup v2, or no limit: it says "max"
        return machine
    return max(0, min(machine, limit - used + reclaimable))


def _fields(text: str, unit: int) -> dict[str, int]:
    return {words[0]: int(words[1]) * unit for words in map(str.split, text.splitlines()) if len(words) > 1}
