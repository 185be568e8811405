"""Accelerators' data sheets, from hardware.toml. Knows nothing of models or of what part of a peak is reached."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

HARDWARE = Path(__file__).parent / "hardware.toml"


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data sheet; see hardware.toml for the units.

    ``cuda``: the engine runs there. ``own_kernels``: so do its own CUDA kernels, which are built for sm_90a; only
    they have quantized weights and KV.
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
    """Returns data sheets by name."""
    tables = tomllib.loads(HARDWARE.read_text(encoding="utf-8"))
    return msgspec.convert(tables, dict[str, Accelerator])
