"""Tests how results are printed: nothing of a table is lost, in a narrow terminal or in a file."""

from __future__ import annotations

import re

import pytest
from rich.table import Table

from baton.console.output import print_table, results

LONG = "mistralai/Mistral-7B-Instruct-v0.3-with-a-name-that-no-terminal-has-room-for-" + 9 * "123456789-"


def table() -> Table:
    shown = Table("worker", "model", box=None)
    shown.add_column("note", no_wrap=True)
    shown.add_row("prefill-0", LONG, "begun anew")
    return shown


def test_a_table_in_a_pipe_is_as_wide_as_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(table())
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2
    assert rows[1].split() == ["prefill-0", LONG, "begun", "anew"]


def test_a_table_in_a_narrow_terminal_breaks_cells_and_keeps_each_character(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table(table())
    lines = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 40
    shown = lines[0].index("model"), lines[0].index("note")
    assert "".join(line[slice(*shown)].strip() for line in lines[1:]) == LONG


def test_a_line_of_results_is_not_broken_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    results().print("a word " * 40)
    assert len(capsys.readouterr().out.splitlines()) == 1
