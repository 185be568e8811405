"""Run the benchmark and show what it says: a table, and files when asked for. Knows nothing of measuring."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from baton.console.kvbench import kv, prefix_index, rows
from baton.protos.errors import ConfigError

SMALL_PAGE_BYTES = 32 << 10


def show(
    rounds: int,
    total_bytes: int,
    page_bytes: int,
    json_file: str | None,
    plot_file: str | None,
    tier_model: str | None = None,
) -> int:
    """Measure, print, write. Raises ConfigError for sizes that don't fit each other."""
    if total_bytes % page_bytes or page_bytes % SMALL_PAGE_BYTES:
        raise ConfigError("--mib must be a multiple of --page-kib, and that one of 32", "page_kib")
    found = [*kv.run(rounds, total_bytes, page_bytes, SMALL_PAGE_BYTES), *prefix_index.rows()]
    if tier_model:
        from baton.console.kvbench import tiers  # loads torch

        found += tiers.rows(tier_model, rounds=rounds)
    Console(highlight=False, width=150).print(rows.table(found))
    if json_file:
        Path(json_file).write_text(rows.to_json(found) + "\n")
    if plot_file:
        rows.plot(found, plot_file)
    return 0
