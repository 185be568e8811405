"""Bounds what grammars may cost: one of them, a tenant's, and all together.

Knows nothing of who enforces it: the kernel enforces ``ProcessBounds``, the engine and the router the rest.
"""

from __future__ import annotations

import msgspec

TENANT_BYTES, TOTAL_BYTES = 512 << 20, 1 << 30  # of all of a tenant's processes, and of everybody's
TENANT_KEPT, TOTAL_KEPT = 16, 64  # grammars that nobody follows now, kept for the next request
COMPILING = 2  # grammars compiled at once, each tenant's one at a time
RESTARTS = 3  # of a grammar whose process ended through no fault of its own


class ProcessBounds(msgspec.Struct, frozen=True):
    """Bounds the process of one grammar.

    An ordinary schema compiles in 1–20 ms and 64 KB of enum in 0.1 s; a mask takes 0.01–5 ms.
    """

    compile_cpu_s: float = 2.0  # seconds of CPU to compile
    step_cpu_s: float = 0.25  # per mask
    token_cpu_s: float = 0.001  # further, per token consumed
    memory_bytes: int = 256 << 20  # beyond what the process has at its start

    @property
    def exceeded(self) -> str:
        """Returns the error text for the client whose grammar exceeded the bounds."""
        return (
            f"the grammar is too complex: it took over {self.compile_cpu_s:g} s of CPU to compile, "
            f"{self.step_cpu_s:g} s for one token, or {self.memory_bytes >> 20} MiB of memory; use shorter "
            "repeats, fewer alternatives, and no intersections or complements of long patterns"
        )
