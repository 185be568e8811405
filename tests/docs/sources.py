"""The sources as syntax trees, parsed and walked once for all tests of a process. Knows nothing of who asks."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def tree_of(path: Path) -> ast.Module:
    """Returns the module at ``path``."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Returns all nodes of the module at ``path``, as ``ast.walk`` yields them."""
    return tuple(ast.walk(tree_of(path)))


@cache
def paths(*folders: str) -> tuple[Path, ...]:
    """Returns the modules below ``folders`` of the repository; generated ones are left out."""
    below = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return tuple(path for path in below if "_pb2" not in path.name)


def modules(*folders: str) -> dict[str, tuple[ast.AST, ...]]:
    """Returns the nodes of each module below ``folders``, by its path in the repository."""
    return {str(path.relative_to(ROOT)): nodes_of(path) for path in paths(*folders)}
