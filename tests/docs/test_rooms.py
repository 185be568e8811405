"""Folders are taken in at a glance, and files stay short."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_NAMES = 22  # of a folder, because more are not seen at once
MOST_LINES = 420  # of a Python file
TABLES = {"tests/drill/bugs.py"}  # one table each, which a reader looks things up in
# Folders of one kind of thing: packages, a model architecture per file, an op per folder.
OPEN = {"baton", "baton/engine/models", "baton/kernels"}


def names(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name not in ("__init__.py", "__pycache__", "README.md")]


def test_no_folder_holds_more_names_than_one_sees_at_once() -> None:
    folders = (path for path in (ROOT / "baton").rglob("*") if path.is_dir() and path.name != "__pycache__")
    crowded = {str(folder.relative_to(ROOT)): len(names(folder)) for folder in folders}
    assert {name: count for name, count in crowded.items() if count > MOST_NAMES and name not in OPEN} == {}


def test_no_file_is_longer_than_a_reader_follows() -> None:
    files = (path for folder in ("baton", "bench", "tests") for path in (ROOT / folder).rglob("*.py"))
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files if "_pb2" not in path.name}
    assert {name: count for name, count in lines.items() if count > MOST_LINES and name not in TABLES} == {}
