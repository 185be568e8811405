"""Runs the engine's benchmark and shows the results as a table and, on request, in files.

Knows nothing of measuring.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rich.console import Console

from baton.bench import rows
from baton.bench.engine import attention, linear, start, step
from baton.bench.engine.models import SIZES
from baton.bench.rows import Row
from baton.kernels.abi import native
from baton.process.output_files import require_place, require_plot, write_file
from baton.protos.errors import ConfigError

SCHEMES = ("bf16", "int8", "int4")
KVS = ("float32", "bf16", "fp16", "int8", "fp8")
PARTS = ("linear", "attention", "step", "start")
STARTS = 3  # starts at most, because each loads the whole model


def show(
    sizes: Sequence[str],
    schemes: Sequence[str],
    kv: str,
    batches: tuple[int, ...],
    rounds: int,
    json_file: str | None,
    plot_file: str | None,
    parts: Sequence[str] = PARTS,
) -> int:
    """Runs the benchmark, prints a table and writes the named files; returns exit status 0.

    Raises ConfigError for unknown names, for files that can't be written, and if there are no native kernels.
    """
    _require_known("part", parts, PARTS)
    _require_known("size", sizes, SIZES)
    _require_known("scheme", schemes, SCHEMES)
    _require_known("kv", [kv], KVS)
    require_place(json_file)
    require_plot(plot_file)
    if native.library() is None:
        raise ConfigError("the engine's benchmark needs the native kernels: install a C++ compiler", "device")
    found = list(_rows(sizes, schemes, kv, batches, rounds, parts))
    Console(highlight=False, width=150).print(rows.table(found))
    if json_file:
        write_file(json_file, rows.to_json(found).encode() + b"\n")
    if plot_file:
        rows.plot(found, plot_file)
    return 0


def _rows(
    sizes: Sequence[str],
    schemes: Sequence[str],
    kv: str,
    batches: tuple[int, ...],
    rounds: int,
    parts: Sequence[str],
) -> Iterator[Row]:
    if "linear" in parts:
        yield from linear.rows(rounds)
    if "attention" in parts:
        yield from attention.rows(rounds)
    for size in sizes:
        for scheme in schemes:
            if "step" in parts:
                yield from step.rows(size, scheme, kv, batches, rounds)
            if "start" in parts and scheme != "bf16":
                yield from start.rows(size, scheme, min(rounds, STARTS))


def _require_known(what: str, given: Sequence[str], known: Collection[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigError(f"--{what} {', '.join(unknown)} is unknown; choose of {', '.join(known)}", what)
