"""Accelerators' data sheets, from hardware.toml.

Knows nothing of models or of what share of a peak is reached.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

HARDWARE = Path(__file__).parent / "hardware.toml"


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds an accelerator's data sheet: peak FLOP/s, memory bandwidth and size in bytes, link and network bytes/s,
    watts.

    ``cuda``: Baton's engine runs on it. ``own_kernels``: so do the engine's own CUDA kernels (built for sm_90a),
    the only ones with quantized weights and KV.
    """

    flops: float
    memory_bytes_per_s: float
    memory: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    power: float
    cuda: bool = True
    own_kernels: bool = False


def accelerators() -> dict[str, Accelerator]:
    """Returns the known accelerators' data sheets, by lower-case name."""
    tables = tomllib.loads(HARDWARE.read_text(encoding="utf-8"))
    return msgspec.convert(tables, dict[str, Accelerator])
