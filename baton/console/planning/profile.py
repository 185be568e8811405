"""`baton profile`: a worker's costs, from operator timings, a data sheet or a live worker, as one small file.

Knows nothing of how costs are found; it reads flags and writes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console

from baton.console.output import guarded, results, write_json
from baton.process.output_files import require_place, write_file

app = typer.Typer(no_args_is_help=True, help="Cost curves of workers: from operator timings or data sheets.")


@app.callback()
def _group() -> None:
    """Cost curves of workers."""


@app.command("import")
def import_command(
    source: Annotated[str, typer.Argument(help="roofline:MODEL@GPUxN, or a folder of operator timings")],
    out: Annotated[str | None, typer.Option(help="Write a paced profile (.toml) there")] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Of the paced engine")] = 128256,
    max_model_len: Annotated[int, typer.Option(min=1, help="Of the paced engine")] = 131072,
    chunk: Annotated[int, typer.Option(min=16, help="Prompt tokens per prefill step")] = 2048,
    json: Annotated[str | None, typer.Option("--json", help="Write the costs there; - prints them")] = None,
) -> None:
    """Show what a worker costs, and write it as a profile for the simulator and `--device paced:FILE`."""

    def run() -> int:
        from baton.planner.costs.paced_file import to_toml
        from baton.planner.costs.worker import worker_costs

        require_place(out, json)
        costs = worker_costs(source, chunk)
        text = to_toml(costs, vocab_size, max_model_len, chunk)
        if out is not None:
            write_file(out, text.encode())
        if not write_json(json, msgspec.to_builtins(costs)):
            results().print(text, markup=False, end="", soft_wrap=True)
        return 0

    raise typer.Exit(guarded(run))


@app.command("measure")
def measure_command(
    slot: Annotated[
        str, typer.Argument(help="A decode worker, as `baton workers` names it; default: the idlest")
    ] = "",
    out: Annotated[str | None, typer.Option(help="Write a paced profile (.toml) there")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=50, help="Of each prompt; the median counts")] = 3,
    json: Annotated[str | None, typer.Option("--json", help="Write points and costs there; - prints them")] = None,
) -> None:
    """Measure a live worker of the one cluster on this machine; best while it has nothing else to do."""

    def run() -> int:
        import asyncio
        import tempfile
        from pathlib import Path

        from baton.console.cluster.workers import local_config
        from baton.console.planning.liveprofile import measure
        from baton.planner.costs.measured import predicted
        from baton.planner.costs.paced_file import to_toml

        require_place(out, json)
        console = Console(highlight=False, stderr=True)
        found = asyncio.run(measure(local_config(Path(tempfile.gettempdir())), slot, repeats, console.print))
        info, curve = found.info, found.costs.curve
        off = [predicted(curve, p) / p.seconds - 1 for p in found.points]
        lines = [
            f"# {p.what}: {p.seconds:.6f} s, by the curve {o:+.1%}" for p, o in zip(found.points, off, strict=True)
        ]
        text = to_toml(found.costs, info.vocab_size, info.max_model_len, found.chunk_tokens)
        text = "\n".join(["# Measured; with the points, and how far the curve is off each:", *lines, text])
        if out is not None:
            write_file(out, text.encode())
        if not write_json(json, msgspec.to_builtins({"points": found.points, "costs": found.costs})):
            results().print(text, markup=False, end="", soft_wrap=True)
        return 0

    raise typer.Exit(guarded(run))
