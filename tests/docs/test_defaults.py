"""Tests that a default is taken where nothing was given, and not where what was given happens to be empty."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.docs.sources import modules


def emptiable() -> Iterator[str]:
    """Yields the names of the classes whose objects may be false."""
    for nodes in modules("baton").values():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                if methods & {"__len__", "__bool__"}:
                    yield node.name


def test_no_object_that_is_empty_is_replaced_by_a_new_one() -> None:
    classes = set(emptiable())
    found = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, nodes in modules("baton").items()
        for node in nodes
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)
        for value in node.values[1:]
        if isinstance(value, ast.Call) and ast.unparse(value.func).split("[")[0].split(".")[-1] in classes
    ]
    assert not found, "ask for None, because an empty one is somebody's"
