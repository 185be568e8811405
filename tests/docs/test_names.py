"""Files, modules and identifiers that the pages name are there, so that a rename doesn't leave a stale page."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUFFIXES = (
    ".py", ".pyi", ".proto", ".md", ".h", ".c", ".cpp", ".cu", ".cuh", ".html", ".js", ".css", ".svg", ".sh",
    ".yaml", ".toml", ".json", ".jsonl", ".csv", ".txt",
)  # fmt: skip
SOURCES = (".py", ".proto", ".h", ".cpp", ".cu", ".cuh", ".yaml", ".js", ".html", ".tpl", "Makefile", ".md")
FOLDERS = ("baton", "bench", "deploy", "docs", "examples", "models", "tests")
# Files that users, commands or other projects make.
FOREIGN_FILES = {
    "1_Pooling/config.json", "config_sentence_transformers.json", "gpu.json", "keys.json",
    "mooncake_conversation.jsonl", "parts.json", "rows.jsonl",
}  # fmt: skip
FOREIGN_WORDS = {
    "baton/fabric",  # a label of Ray's nodes
    "CreateContainerConfigError",  # a state of Kubernetes' containers
    "isopower_conv_configs",  # a set of configurations of a paper
}
QUOTED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w{},*-][\w.{},*-]*(?:/[\w.{},*-]+)*/?")
# Lines of code that name the type Any: dispatch by type, libraries without types, values of JSON.
ANNOTATED = re.compile(r"^(?!from |import )[^\n\"#]*(?:[\[:(,|=]|->) ?Any\b.*$", re.M)
MOST_ANY = 54
PUBLIC_CLASS = re.compile(r"^class ([A-Z]\w*)", re.M)
IDENTIFIER = re.compile(r"\w*(?:[a-z][A-Z]|\w_\w|^_\w)\w*")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
# Made of a shorter name in the sources: metrics get a prefix and a unit, settings' variables the section's name.
DERIVED = re.compile(r"baton_\w+|BATON_\w+__\w+")


def test_a_class_name_has_one_meaning_in_the_package() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "baton").rglob("*.py")):
        if "_pb2" not in path.name:
            for name in PUBLIC_CLASS.findall(path.read_text()):
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_any_only_gets_rarer() -> None:
    used = Counter(
        str(path.relative_to(ROOT))
        for path in (ROOT / "baton").rglob("*.py")
        if "_pb2" not in path.name
        for line in ANNOTATED.findall(path.read_text())
    )
    assert sum(used.values()) <= MOST_ANY, f"name the type, or say in an alias why there is none: {used}"


@cache
def tree() -> frozenset[str]:
    """Returns the files of the folders that hold sources and pages, and those beside them."""
    below = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    found = [path for path in (*below, *ROOT.iterdir()) if path.is_file()]
    return frozenset(path.relative_to(ROOT).as_posix() for path in found)


@cache
def endings() -> frozenset[str]:
    """Returns every file and folder of the tree, under its whole path and each shorter ending of it."""
    parts = [Path(path).parts for path in tree()]
    whole = {found[:count] for found in parts for count in range(1, len(found) + 1)}
    return frozenset("/".join(found[begin:]) for found in whole for begin in range(len(found)))


@cache
def words() -> frozenset[str]:
    """Returns the identifiers of the sources; of pages only those in fenced blocks."""
    found: set[str] = set()
    for path in tree():
        if path.startswith("tests/data/") or path == "tests/docs/test_names.py":
            continue
        if path.endswith(SOURCES) or path.startswith("deploy/docker/"):
            text = (ROOT / path).read_text()
            text = "\n".join(re.findall(r"```.*?```", text, re.S)) if path.endswith(".md") else text
            found.update(re.findall(r"[A-Za-z_]\w*", text))
    return frozenset(found)


def quoted(page: str) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    yield from (found.strip() for found in QUOTED.findall(text))


def is_path(name: str) -> bool:
    return bool(PATH.fullmatch(name)) and (
        name.endswith(SUFFIXES) or ("/" in name and name.split("/")[0] in FOLDERS)
    )


def exists(path: str) -> bool:
    """Returns whether the tree has the file or folder; ``{a,b}`` and ``*`` stand for several."""
    path = path.rstrip("/")
    if several := re.search(r"\{([^}]*)\}", path):
        return all(exists(path[: several.start()] + one + path[several.end() :]) for one in several[1].split(","))
    return path in endings() or ("*" in path and bool(fnmatch.filter(endings(), path)))


def stale(name: str) -> bool:
    """Returns whether ``name`` is a path, an identifier or a dotted name, and nothing is called so."""
    if name in FOREIGN_FILES | FOREIGN_WORDS:
        return False
    if is_path(name):
        return not exists(name)
    called = name.partition("(")[0]
    if DOTTED.fullmatch(called):
        return called.rpartition(".")[2] not in words()
    return bool(IDENTIFIER.fullmatch(called)) and called not in words() and not DERIVED.fullmatch(called)


def test_every_file_and_name_that_a_page_names_is_there() -> None:
    pages = sorted(path for path in tree() if path.endswith(".md") and path != "CHANGELOG.md")
    assert len(pages) > 30
    assert [f"{page}: {name}" for page in pages for name in quoted(page) if stale(name)] == []


def test_a_name_that_is_there_is_told_from_a_stale_one() -> None:
    there = (
        "baton/protos/errors.py",
        "step/cuda.cu",
        "docs/{api,ray}.md",
        "baton/kernels/*/reference.py",
        "WorkerSpec",
    )
    gone = (
        "protos/errors_.py",
        "baton/no_such_room",
        "docs/{api,no}.md",
        "Worker" + "Rooster",
        "kv.wire.no" + "_such",
    )
    assert [name for name in there if stale(name)] == []
    assert [name for name in gone if not stale(name)] == []
    assert not stale("WorkerSpec")
    assert stale("WorkerRooster")
    assert stale("worker.spec.WorkerRooster")
