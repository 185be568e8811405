"""Wires can be seen: private names stay inside, no name of a handler is put together, no module is patched."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.docs.sources import ROOT, modules

Nodes = tuple[ast.AST, ...]  # of a module


def imports(nodes: Nodes) -> Iterator[tuple[str, str, int]]:
    """Each name that a module imports from one of ours: the module, the name there, the line."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("baton", "bench"):
            yield from ((node.module or "", name.name, node.lineno) for name in node.names)


def test_private_names_are_not_imported_from_outside() -> None:
    found = [
        f"{path}:{line} {module}.{name}"
        for path, nodes in modules("baton", "bench").items()
        for module, name, line in imports(nodes)
        if name.startswith("_") or any(part.startswith("_") for part in module.split("."))
    ]
    assert found == []


def test_no_method_is_called_by_a_name_that_is_put_together() -> None:
    """Messages and kinds are matched, or looked up in a table, so that a reader finds who handles them."""
    found = [
        f"{path}:{node.lineno}"
        for path, nodes in modules("baton").items()
        for node in nodes
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "getattr"
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id == "self"
        and isinstance(node.args[1], ast.JoinedStr)
        and isinstance(node.args[1].values[0], ast.Constant)
        and str(node.args[1].values[0].value).startswith(("_", "on_", "handle_"))
    ]
    assert found == []


def test_what_a_choice_keeps_is_set_by_its_owner_alone() -> None:
    """Retries, progress, the stream and the record of a choice: others read them and call their methods. A stream
    keeps its own summary.
    """
    owned = {"retries", "progress", "stream", "trail", "summary"}
    found = [
        f"{path}:{node.lineno}"
        for path, nodes in modules("baton/router").items()
        if path != "baton/router/request/request.py"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Attribute | ast.Name)
        and (node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id) in owned
    ]
    assert found == []


def is_module(module: str, name: str) -> bool:
    """Returns whether ``name`` in ``module`` is a file of ours."""
    return (ROOT / module.replace(".", "/") / f"{name}.py").exists()


def is_mock(node: ast.AST) -> bool:
    return (isinstance(node, ast.ImportFrom) and node.module in ("unittest", "unittest.mock")) or (
        isinstance(node, ast.Import) and any(name.name.startswith("unittest") for name in node.names)
    )


def is_assigned_by_name(node: ast.AST) -> bool:
    """Returns whether the node sets an attribute by a literal name, which an assignment would do in sight."""
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "setattr"
        and isinstance(node.args[1], ast.Constant)
    )


def is_private_of_another(node: ast.Attribute) -> bool:
    return node.attr.startswith("_") and not node.attr.startswith("__") and ast.unparse(node.value) != "self"


def patches(nodes: Nodes, bench: bool) -> Iterator[ast.AST]:
    """Yields what changes a module of ours; in benches also what sets private attributes of a part."""
    modules = {name for module, name, _ in imports(nodes) if is_module(module, name)}
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    yield from (node for node in stored if isinstance(node.value, ast.Name) and node.value.id in modules)
    yield from (node for node in nodes if is_mock(node))
    if bench and any(module.split(".")[0] == "baton" for module, _, _ in imports(nodes)):
        yield from (node for node in stored if is_private_of_another(node))
        yield from (node for node in nodes if is_assigned_by_name(node))


def test_no_part_of_the_product_is_patched() -> None:
    """Benches use seams that the product declares (``kv/memory/block_sums.py``) or wrap a part."""
    found = [
        f"{path}:{getattr(node, 'lineno', 0)} {ast.unparse(node)}"
        for path, nodes in modules("baton", "bench").items()
        for node in patches(nodes, path.startswith(("bench/", "baton/bench/")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "loop.STEP_S = 1",
        "runner._clock = clock",
        "drafter._plans = drafter._drafts = []",
        "from unittest import mock",
        'setattr(drafter, "plan", timed)',
    ],
)
def test_a_patch_is_found(line: str) -> None:
    tree = ast.parse(f"from baton.engine.steps import loop\n{line}")
    assert list(patches(tuple(ast.walk(tree)), bench=True))


def test_benches_import_no_tests() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, nodes in modules("baton", "bench").items()
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests"
    ]
    assert found == []


PAGE_COUNTS = {"pages", "free_pages", "cached_pages", "leased_pages", "page_bytes"}
OUTSIDE = ("cluster", "console", "controller", "router", "router_host")


def test_who_judges_workers_leaves_it_to_one_module_what_a_page_holds() -> None:
    found = [
        f"{path}:{node.lineno}"
        for folder in OUTSIDE
        for path, nodes in modules(f"baton/{folder}").items()
        for node in nodes
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv)
        if PAGE_COUNTS & set(_names(node)) and {"BLOCK_TOKENS", "block_tokens"} & set(_names(node))
    ]
    assert not found, f"take held_tokens, pool_tokens or handoff_bytes of kv/layout/room.py: {found}"


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            yield node.attr if isinstance(node, ast.Attribute) else node.id
