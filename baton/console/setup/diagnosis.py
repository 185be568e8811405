"""``baton check`` and ``baton doctor``: checks of the configuration, and of the machine. Flags in, findings out.

Knows nothing of what is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

Guard = Callable[[Callable[[], int]], int]
_Json = Annotated[bool, typer.Option("--json", help="Findings as JSON; the exit code is the same")]


def register(app: typer.Typer, guarded: Guard) -> None:
    """Adds the commands ``check`` and ``doctor`` to the `baton` command."""

    @app.command()
    def check(
        file: Annotated[
            list[str] | None, typer.Option("-f", "--file", help="baton.toml, or values.yaml (may be given again)")
        ] = None,
        chart: Annotated[
            str | None, typer.Option(help="The chart's folder; default: the one of this checkout")
        ] = None,
        json: _Json = False,
    ) -> None:
        """Check a baton.toml, or values of the Helm chart; nothing is started. Exit code 1 when it is wrong."""
        from baton.console.setup.check import check_files
        from baton.console.setup.findings import show

        raise typer.Exit(guarded(lambda: show(check_files(file or (), chart), json)))

    @app.command()
    def doctor(
        config: Annotated[
            str | None, typer.Option(help="A baton.toml; default: ./baton.toml if there is one")
        ] = None,
        quick: Annotated[bool, typer.Option("--quick", help="Without measuring transports (2 s)")] = False,
        gpu: Annotated[
            bool, typer.Option("--gpu", help="Try the GPU's kernels op by op beside torch's, and keep the figures")
        ] = False,
        json: _Json = False,
    ) -> None:
        """Examine this machine for what the config asks of it, with remedies. Exit code 1 when something fails."""
        from baton.console.setup.doctor.card import try_card
        from baton.console.setup.doctor.examine import examine
        from baton.console.setup.findings import show

        if gpu:
            raise typer.Exit(guarded(lambda: show(try_card(tell=_trying), json)))
        raise typer.Exit(guarded(lambda: show(examine(config, quick), json)))


def _trying(name: str) -> None:
    """Says on stderr what is tried next, because it may take seconds, or hang."""
    print(f"trying {name}", file=sys.stderr, flush=True)
