"""A command's options in groups: typer sees each of them, and the command gets the groups."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from baton.console.option_groups import with_groups

CONSOLE = Path(__file__).parents[2] / "baton" / "console"
MOST_PARAMETERS = 8  # of a function, because a caller mixes up more


@dataclass(frozen=True)
class Size:
    rows: Annotated[int, typer.Option(min=1, help="How many rows")]
    names: Annotated[list[str] | None, typer.Option("--name")] = None


@dataclass(frozen=True)
class WideSize(Size):
    columns: Annotated[int, typer.Option()] = 3


def command(seen: list[object]) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @with_groups
    def draw(path: Annotated[str, typer.Argument()], size: WideSize, quick: bool = False) -> None:
        """Draw a table."""
        seen.extend((path, size, quick))

    return app


def test_the_command_gets_a_group_of_what_was_given_and_of_defaults() -> None:
    seen: list[object] = []
    given = ["out", "--name", "a", "--rows", "2", "--quick", "--name", "b"]
    assert CliRunner().invoke(command(seen), given).exit_code == 0
    assert seen == ["out", WideSize(rows=2, names=["a", "b"]), True]


def test_options_stand_in_the_help_in_the_order_of_parameters_and_fields() -> None:
    parameters = typer.main.get_command(command([])).params
    assert [p.name for p in parameters][:5] == ["path", "rows", "names", "columns", "quick"]
    assert CliRunner().invoke(command([]), ["--help"]).output.find("Draw a table.") > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [(["out"], "--rows"), (["out", "--rows", "0"], "rows"), (["out", "--rows", "1", "--x"], "--x")],
)
def test_a_group_is_checked_like_any_option(given: list[str], said: str) -> None:
    seen: list[object] = []
    done = CliRunner().invoke(command(seen), given, env={"TERM": "dumb"})
    assert (done.exit_code, seen) == (2, [])
    assert said in done.output


def test_two_options_of_one_name_are_refused() -> None:
    def twice(size: Size, wide: WideSize) -> None:
        """Has rows twice."""

    with pytest.raises(ValueError, match="rows"):
        with_groups(twice)


def test_no_function_of_the_console_has_more_parameters_than_a_caller_keeps_apart() -> None:
    found = {
        f"{path.relative_to(CONSOLE)}: {node.name}": count
        for path in sorted(CONSOLE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and (count := len(node.args.args) + len(node.args.kwonlyargs)) > MOST_PARAMETERS
    }
    assert found == {}
