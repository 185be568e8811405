"""The planning commands, gathered for `main`: sim, trace, profile, plan."""

from __future__ import annotations

import typer

from baton.console import sim, trace


def register(app: typer.Typer) -> None:
    """Add them to the `baton` command."""
    app.add_typer(sim.app, name="sim")
    app.add_typer(trace.app, name="trace")
