"""Pages that are written by hand have lines that fit."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
WIDTH = 116  # columns, as of the code
GENERATED = {"configuration.md", "cuda.md", "fields.md", "metrics.md"}
RECORDS = {"notebook.md"}
KEPT_AS_THEY_ARE = ("|", "```", "#", "    ")  # tables, code and titles can't be wrapped


def _long_lines(page: Path) -> list[int]:
    found, is_code = [], False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if len(line) > WIDTH and not is_code and not line.startswith(KEPT_AS_THEY_ARE):
            found.append(number)
    return found


def test_lines_of_prose_fit() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    long = {page.name: _long_lines(page) for page in pages if page.name not in GENERATED | RECORDS}
    assert {name: lines for name, lines in long.items() if lines} == {}
