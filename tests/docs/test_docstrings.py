"""Public docstrings are sentences that stand alone, and the names of ours in them are names that exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.cluster.config import BatonConfig
from tests.docs.sources import ROOT, nodes_of, paths, tree_of

# First words that lean on something outside of the docstring.
FRAGMENTS = frozenset(
    {
        "Of", "What", "It", "They", "That", "So", "Nothing", "As", "Who",
        "How", "Whether", "From", "With", "Without", "And", "Also", "None", "Now",
    }
)  # fmt: skip
FEWEST_WORDS = 4  # of a first sentence, because fewer have no room for a verb and what it is about
# How many docstrings of each package may be fragments still. Numbers only ever get lower; a package that is done is
# not named.
CEILINGS: dict[str, int] = {}
MOST_FRAGMENTS = 2  # of all docstrings, private ones and modules included; it only gets lower
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Documented(NamedTuple):
    package: str
    place: str
    text: str


def definitions(node: ast.AST) -> Iterator[Definition]:
    """Yields the public definitions: those not inside functions, nor in a private class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child)
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from definitions(child)


@cache
def docstrings() -> tuple[tuple[Path, int, str], ...]:
    """Returns each docstring of a module, class or function, private ones too, with its path and line."""
    return tuple(
        (path.relative_to(ROOT), getattr(node, "lineno", 1), text)
        for path in paths("baton")
        for node in nodes_of(path)
        if isinstance(node, ast.Module | Definition) and (text := ast.get_docstring(node))
    )


def documented() -> Iterator[Documented]:
    for file in paths("baton"):
        path = file.relative_to(ROOT)
        package = path.parts[1] if len(path.parts) > 2 else path.name
        for definition in definitions(tree_of(file)):
            text = ast.get_docstring(definition)
            if text:
                yield Documented(package, f"{path}:{definition.lineno} {definition.name}", text)


def first_sentence(text: str) -> str:
    return " ".join(re.split(r"(?<=[.!?])(?=\s|$)", text.strip(), maxsplit=1)[0].split())


def is_fragment(text: str) -> bool:
    words = first_sentence(text).split()
    return len(words) < FEWEST_WORDS or words[0].strip("`,;:.") in FRAGMENTS


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("Now.", True),
        ("So far.", True),
        ("As the library does it.", True),
        ("Returns the ids of any text.", False),
        ("Takes a worker out of the\nrotation. None: put it back.", False),
        ("What became certain with ``text``, of either.", True),
    ],
)
def test_a_fragment_is_told_from_a_sentence(text: str, fragment: bool) -> None:
    assert is_fragment(text) is fragment


def test_no_package_has_more_fragments_than_it_had() -> None:
    found = [d for d in documented() if is_fragment(d.text)]
    counts = Counter(d.package for d in found)
    over = {name: count for name, count in counts.items() if count > CEILINGS.get(name, 0)}
    listed = [f"{d.place}: {first_sentence(d.text)}" for d in found if d.package in over]
    assert not over, "\n".join([f"over the ceiling: {over}", *listed[:40]])


def test_no_docstring_in_the_product_begins_with_a_word_that_leans_on_another() -> None:
    """Private ones and modules too; how long a first sentence is counts for public ones alone."""
    found = [
        f"{path}:{line}: {first_sentence(text)}"
        for path, line, text in docstrings()
        if first_sentence(text).split()[0].strip("`,;:.") in FRAGMENTS
    ]
    assert len(found) <= MOST_FRAGMENTS, "\n".join(found)


TOP = frozenset(path.name.removesuffix(".py") for path in (ROOT / "baton").iterdir() if path.name[0] != "_")
DOTTED = re.compile(r"``((?:[a-z_][a-z0-9_]*)(?:\.[A-Za-z_][A-Za-z0-9_]*)+)``")
PATHS = re.compile(r"``((?:[a-z_][a-z0-9_]*/)+[a-z_][a-z0-9_]*(?:\.py)?)``")


def names_in(text: str) -> Iterator[str]:
    """Dotted names and paths in double backticks that begin with a package of ours."""
    for name in (*DOTTED.findall(text), *PATHS.findall(text)):
        if re.split(r"[./]", name.removeprefix("baton.").removeprefix("baton/"))[0] in TOP:
            yield name


def exists(name: str, folder: Path = ROOT / "baton") -> bool:
    """Returns whether ``name`` is a module, something that one defines, or a setting; names may be relative to
    ``folder``.
    """
    return is_setting(name) or any(is_defined(name, place) for place in (ROOT / "baton", folder))


def is_setting(name: str) -> bool:
    section, _, field = name.partition(".")
    known = BatonConfig.model_fields.get(section)
    return known is not None and field in getattr(known.annotation, "model_fields", {})


def is_defined(name: str, place: Path) -> bool:
    """Returns whether ``name`` is defined below ``place``; an attribute counts if its class binds it somewhere."""
    parts = re.split(r"[./]", name.removesuffix(".py").removeprefix("baton.").removeprefix("baton/"))
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    if not parts:
        return True
    module = place if place.suffix else place / "__init__.py"
    return module.is_file() and parts[0] in names_of(module.relative_to(ROOT))


@cache
def names_of(module: Path) -> frozenset[str]:
    """Returns the names that a module binds: definitions, assignments, attributes and imports."""
    found: set[str] = set()
    for node in nodes_of(ROOT / module):
        if isinstance(node, Definition):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return frozenset(found)


def test_names_of_ours_in_docstrings_exist() -> None:
    missing = [
        f"{path}:{line}: {name}"
        for path, line, text in docstrings()
        for name in names_in(text)
        if not exists(name, ROOT / path.parent)
    ]
    assert not missing, "\n".join(missing)


def test_a_name_that_exists_is_found_and_another_is_not() -> None:
    assert exists("protos.nouns.WorkerInfo")
    assert exists("baton.router.dispatch")
    assert exists("protos/errors.py")
    assert not exists("cluster.membership.Rooster")
    assert not exists("router/dispatch/nowhere.py")
