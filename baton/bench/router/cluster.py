"""A cluster for benchmarking a router: real processes with paced workers, and the router's CPU time and memory.

Knows nothing of what is measured. It is a ``launch.fleet`` without Ray, which is on no request's path.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from baton.launch.fleet import Fleet

PROFILE = """
about = "{about}"
kv_bytes_per_token = 64
model_kv_bytes_per_token = 64
pages = {pages}
vocab_size = 32000
max_model_len = 131072
prefill_chunk = {chunk}

[step]
fixed = {fixed}
prefill_token = {prefill}
prefill_pair = 0.0
decode_sequence = 0.0
decode_context_token = 0.0

[transfer]
fixed = 0.0
per_byte = 0.0
"""


class BenchCluster(Fleet):
    """A running cluster with one router, as a context manager; ``url`` is the router's.

    ``fixed`` is the seconds of a step, ``prefill_s`` the seconds that each prompt token adds, ``chunk`` the tokens
    of a prefill chunk; ``router`` are fields of the router's configuration.
    """

    def __init__(
        self, decode: int = 1, prefill: int = 0, fixed: float = 0.0, prefill_s: float = 0.0, pages: int = 16384,
        chunk: int = 2048, **router: object,
    ) -> None:  # fmt: skip
        self._profiles = tempfile.TemporaryDirectory(prefix="bb-")
        profile = Path(self._profiles.name, "bench.toml")
        text = PROFILE.format(about="a benchmark's", pages=pages, fixed=fixed, prefill=prefill_s, chunk=chunk)
        profile.write_text(text)
        super().__init__(
            cluster={"prefill": prefill, "decode": decode, "colocated": prefill == 0},
            router=router,
            worker={"device": f"paced:{profile}", "max_batch": 256},
        )

    def close(self) -> None:
        """Ends every process of the cluster."""
        super().close()
        self._profiles.cleanup()

    @property
    def worker_address(self) -> str:
        """Returns the address of the first decode worker."""
        return self.record("decode-0").address

    def cpu_seconds(self) -> float:
        """Returns the user and system CPU seconds of the router's process so far."""
        fields = self._stat("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Returns the resident memory of the router's process, in bytes."""
        return int(self._stat("statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _stat(self, name: str) -> str:
        assert self.router is not None
        return Path(f"/proc/{self.router.pid}/{name}").read_text()
