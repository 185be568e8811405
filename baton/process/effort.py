"""Says how long the threads of another process have computed, or waited for a core, by the kernel's own count.

Knows nothing of what the process is for. A thread that does neither sleeps, is stopped, or waits for a lock or a
disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Effort(NamedTuple):
    """Holds the seconds that a thread computed, and those that it waited for a core to compute on."""

    computed: float
    waited: float

    @property
    def total(self) -> float:
        """Returns the seconds in which the thread had something to compute."""
        return self.computed + self.waited


Efforts = Mapping[int, Effort]  # so far, by thread


def efforts_of(pid: int) -> Efforts:
    """Returns how long each thread of ``pid`` and of its children had a core or waited for one.

    It is empty where the process is gone or the kernel doesn't say (it does in ``/proc/PID/task/TID/schedstat``).
    """
    found: dict[int, Effort] = {}
    for one in (pid, *_children(pid)):
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                with suppress(OSError):  # a thread that has just ended
                    found[int(task.name)] = _effort(task)
    return found


def gained(before: Efforts, after: Efforts) -> Effort:
    """Returns by how much the threads that are in both got on.

    ``computed`` is the most of any thread; ``total`` that of the thread that had most to compute.
    """
    pairs = [(effort, before[thread]) for thread, effort in after.items() if thread in before]
    computed = max((now.computed - then.computed for now, then in pairs), default=0.0)
    total = max((now.total - then.total for now, then in pairs), default=0.0)
    return Effort(computed, total - computed)


def _effort(task: Path) -> Effort:
    ran, waited, _ = (task / "schedstat").read_text().split()
    return Effort(int(ran) / 1e9, int(waited) / 1e9)


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                yield from map(int, (task / "children").read_text().split())
