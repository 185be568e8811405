"""`baton trace`: statistics and export of traces of requests.

Knows nothing of formats or figures; it reads flags and prints.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.console.output import guarded, print_table, results, write_json
from baton.process.output_files import require_place, write_file

app = typer.Typer(no_args_is_help=True, help="Traces of load: Mooncake JSONL, Azure CSV.")


@app.callback()
def _group() -> None:
    """Traces of load."""


@app.command("stats")
def stats_command(
    trace: Annotated[str, typer.Argument(help="A .jsonl (Mooncake) or .csv (Azure) file")],
    window: Annotated[float, typer.Option(min=1.0, help="Seconds per row of the demand ratio")] = 300.0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out lines that can't be read")] = False,
    json: Annotated[str | None, typer.Option("--json", help="Write the result there; - prints it")] = None,
) -> None:
    """Show a trace's lengths, arrivals, reuse, and demand ratio over time."""
    raise typer.Exit(guarded(lambda: _stats(trace, window, skip_bad, json)))


@app.command("export")
def export_command(
    files: Annotated[list[str], typer.Argument(help="Files that routers recorded (router.trace_file)")],
    out: Annotated[str, typer.Option(help="The .jsonl to write")],
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out lines that can't be read")] = False,
    json: Annotated[str | None, typer.Option("--json", help="Write what was joined there; - prints it")] = None,
) -> None:
    """Join recorded files into one trace: by arrival, times and block ids from 0, no text."""
    raise typer.Exit(guarded(lambda: _export(files, out, skip_bad, json)))


def _export(files: list[str], out: str, skip_bad: bool, json: str | None) -> int:
    from baton.planner.traces.trace import joined, read_trace, to_mooncake

    require_place(out, json)
    trace = joined([read_trace(file, skip_bad, from_zero=False) for file in files])
    write_file(out, to_mooncake(trace))
    found = {"out": out, "requests": len(trace.requests), "seconds": trace.duration, "skipped": list(trace.skipped)}
    if write_json(json, found):
        return 0
    told = f"{out}: {len(trace.requests):,} requests, {len(trace.skipped)} lines skipped"
    Console(highlight=False, stderr=True).print(told, markup=False)
    return 0


def _stats(path: str, window: float, skip_bad: bool, json: str | None) -> int:
    from baton.planner.traces.stats import stats
    from baton.planner.traces.trace import read_trace

    trace = read_trace(path, skip_bad)
    for message in trace.skipped:
        Console(stderr=True, highlight=False).print(f"skipped: {message}", markup=False)
    found = stats(trace, window)
    if write_json(json, msgspec.to_builtins(found)):
        return 0
    out, arrivals = results(), found.arrivals
    out.print(
        f"{found.source}: {arrivals.requests:,} requests in {arrivals.duration_s / 60:.1f} min,"
        f" {arrivals.per_second:.2f}/s (peak {arrivals.peak_per_second:.0f}/s,"
        f" burstiness {arrivals.burstiness:.2f}); {found.skipped} lines skipped"
    )
    if found.reuse is not None:
        out.print(f"reuse with an endless cache: {found.reuse.token_hit_rate:.1%} of prompt tokens")
    lengths = Table("tokens", "mean", "median", "p90", "p99", "max")
    for name, f, most in (
        ("input", found.lengths.input, found.lengths.input_max),
        ("output", found.lengths.output, found.lengths.output_max),
    ):
        lengths.add_row(name, f"{f.mean:.0f}", f"{f.median:.0f}", f"{f.p90:.0f}", f"{f.p99:.0f}", str(most))
    print_table(lengths)
    ratios = Table("from", "requests", "input", "uncached", "output", "ratio", "uncached ratio")
    for w in found.windows:
        ratios.add_row(
            _since(w.start_s, window), str(w.requests), f"{w.input_tokens:,}", f"{w.uncached_tokens:,}",
            f"{w.output_tokens:,}", f"{w.ratio:.2f}", f"{w.uncached_ratio:.2f}",
        )  # fmt: skip
    print_table(ratios)
    out.print(f"input : output over the whole trace {found.ratio:.2f}; windows differ {found.ratio_spread:.1f}x")
    return 0


def _since(seconds: float, window: float) -> str:
    """Returns when a window begins, in minutes where windows are whole ones."""
    return f"{seconds:g} s" if window % 60 else f"{seconds / 60:.0f} min"
