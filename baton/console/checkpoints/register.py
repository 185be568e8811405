"""The commands about checkpoints, gathered for `main`: evaluate."""

from __future__ import annotations

import typer

from baton.console.checkpoints import evaluate


def register(app: typer.Typer) -> None:
    """Adds them to the `baton` command."""
    app.command("evaluate")(evaluate.evaluate_command)
