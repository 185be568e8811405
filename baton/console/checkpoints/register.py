"""Registration of the commands about checkpoints: quantize, evaluate."""

from __future__ import annotations

import typer

from baton.console.checkpoints import evaluate, quantize


def register(app: typer.Typer) -> None:
    """Adds the commands about checkpoints to the `baton` command."""
    app.command("evaluate")(evaluate.evaluate_command)
    app.command("quantize")(quantize.quantize_command)
