"""Registration of the planning commands: sim, trace, profile, plan, size."""

from __future__ import annotations

import typer

from baton.console.planning import plan, profile, sim, size, trace


def register(app: typer.Typer) -> None:
    """Adds the planning commands to the `baton` command."""
    app.add_typer(sim.app, name="sim")
    app.add_typer(trace.app, name="trace")
    app.add_typer(profile.app, name="profile")
    app.command("plan")(plan.plan_command)
    app.command("size")(size.size_command)
