"""Wires can be seen: private names stay inside, no name of a handler is put together, no module is patched."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def trees(*folders: str) -> dict[str, ast.Module]:
    """The modules below ``folders``, by path; generated ones are left out."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths if "_pb2" not in path.name}


def imports(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Each name that a module imports from one of ours: the module, the name there, the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("baton", "bench"):
            yield from ((node.module or "", name.name, node.lineno) for name in node.names)


def test_private_names_are_not_imported_from_outside() -> None:
    found = [
        f"{path}:{line} {module}.{name}"
        for path, tree in trees("baton", "bench").items()
        for module, name, line in imports(tree)
        if name.startswith("_") or any(part.startswith("_") for part in module.split("."))
    ]
    assert found == []


def test_no_method_is_called_by_a_name_that_is_put_together() -> None:
    """Messages and kinds are matched, or looked up in a table, so that a reader finds who handles them."""
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees("baton").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "getattr"
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id == "self"
        and isinstance(node.args[1], ast.JoinedStr)
        and isinstance(node.args[1].values[0], ast.Constant)
        and str(node.args[1].values[0].value).startswith(("_", "on_", "handle_"))
    ]
    assert found == []


def test_no_module_of_the_product_is_patched() -> None:
    """Benches use seams that the product declares (``kv/memory/block_sums.py``), and set no module's attributes."""
    found = []
    for path, tree in trees("baton").items():
        modules = {
            name.asname or name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("baton")
            for name in node.names
            if (ROOT / node.module.replace(".", "/") / f"{name.name}.py").exists()
        }
        found += [
            f"{path}:{node.lineno} {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if isinstance(node.value, ast.Name) and node.value.id in modules
        ]
    assert found == []


def test_benches_import_no_tests() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees("baton", "bench").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests"
    ]
    assert found == []
