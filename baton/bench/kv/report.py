"""Runs the KV benchmark and shows the results as a table and, on request, in files. Knows nothing of measuring."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from baton.bench import rows
from baton.bench.kv import prefix_index, transports
from baton.bench.rows import RANDOM
from baton.process.output_files import require_place, require_plot, write_file
from baton.protos.errors import ConfigError

SMALL_PAGE_BYTES = 32 << 10  # bytes of a small page, at which costs per block weigh most


def show(
    rounds: int,
    total_bytes: int,
    page_bytes: int,
    json_file: str | None,
    plot_file: str | None,
    tier_model: str | None = None,
) -> int:
    """Runs the benchmark, prints a table and writes the named files; returns exit status 0.

    Each transport moves ``total_bytes`` in pages of ``page_bytes``; ``tier_model`` adds the tiers' benchmark.
    Raises ConfigError for sizes that aren't multiples of each other, and for paths that don't exist or can't be
    written.
    """
    if total_bytes % page_bytes or page_bytes % SMALL_PAGE_BYTES:
        raise ConfigError("--mib must be a multiple of --page-kib, and that one of 32", "page_kib")
    require_place(json_file)
    require_plot(plot_file)
    if tier_model and tier_model != RANDOM and not Path(tier_model).is_dir():
        raise ConfigError(f"--tier-model {tier_model}: no such directory; {RANDOM} makes a model", "tier_model")
    found = [*transports.run(rounds, total_bytes, page_bytes, SMALL_PAGE_BYTES), *prefix_index.rows()]
    if tier_model:
        from baton.bench.kv import tiers  # loads torch

        found += tiers.rows(tier_model, rounds=rounds)
    Console(highlight=False, width=150).print(rows.table(found))
    if json_file:
        write_file(json_file, rows.to_json(found).encode() + b"\n")
    if plot_file:
        rows.plot(found, plot_file)
    return 0
