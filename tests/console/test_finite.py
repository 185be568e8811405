"""Numbers of the command line and of the configuration are finite: nan and infinities are refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
import typer
from typer.testing import CliRunner

from baton.cluster.config import BatonConfig
from baton.console.main import app
from tests.thorough import first_now


def commands(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    for name, command in getattr(group, "commands", {}).items():
        if getattr(command, "commands", None):
            yield from commands(command, (*path, name))
        yield (*path, name), command


def float_options() -> list[tuple[tuple[str, ...], str]]:
    """Every option of every command that takes a float: the command with what else it needs, and the option."""
    found = []
    for path, command in commands(typer.main.get_command(app)):
        hints = inspect.get_annotations(command.callback, eval_str=True) if command.callback else {}
        for one in command.params:
            if "float" in str(hints.get(one.name, "")) and one.opts and one.opts[0].startswith("--"):
                needed = [
                    "prefill=1" for other in command.params if other.required and "-" not in other.opts[0][:1]
                ]
                found.append(((*path, *needed), one.opts[0]))
    return found


@pytest.mark.parametrize("said", first_now(["nan", "inf", "-inf"]))
def test_no_option_of_a_command_takes_what_is_no_finite_number(said: str) -> None:
    options = float_options()
    assert (("plan",), "--speed") in options
    assert len(options) > 20
    for path, option in options:
        done = CliRunner().invoke(app, [*path, f"{option}={said}"], env={"TERM": "dumb", "COLUMNS": "200"})
        assert done.exit_code == 2, (path, option, done.output)
        assert option in done.output, (path, option, done.output)


def test_a_plan_at_infinite_speed_is_refused_by_name(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 500, "output_length": 5, "hash_ids": [1]}\n')
    asked = ["plan", "--trace", str(trace), "--profile", "zero", "--workers", "2", "--speed", "inf"]
    done = CliRunner().invoke(app, asked, env={"TERM": "dumb", "COLUMNS": "200"})
    assert done.exit_code == 2
    assert "--speed" in done.output
    assert "no finite number" in done.output


@pytest.mark.parametrize("said", [float("inf"), float("nan")])
def test_no_setting_is_infinite_or_no_number(said: float) -> None:
    with pytest.raises(pydantic.ValidationError, match=r"router\.stall_s\n.*finite number"):
        BatonConfig(router={"stall_s": said})
