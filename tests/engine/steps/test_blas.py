"""Tests that what runs between two steps of an engine multiplies no matrices."""

from __future__ import annotations

import ast
from pathlib import Path

import baton

ROOT = Path(baton.__file__).parent
BETWEEN_STEPS = ("kv", "decode_worker/engine", "prefill_worker/engine", "engine/steps", "engine/speculate")
MODELS = ROOT / "engine/speculate/heads"  # they compute on the threads of a step, which wait meanwhile
PRODUCTS = {"dot", "matmul", "inner", "einsum", "tensordot", "vdot"}


def is_product(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp | ast.AugAssign):
        return isinstance(node.op, ast.MatMult)
    return isinstance(node, ast.Attribute) and (node.attr in PRODUCTS or node.attr == "linalg")


def test_nothing_between_two_steps_wakes_the_threads_of_a_blas() -> None:
    """A BLAS's threads spin for tens of milliseconds after a product, and a step's own threads then lack a core."""
    found = [
        f"{path.relative_to(ROOT.parent)}:{node.lineno}"
        for folder in BETWEEN_STEPS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if MODELS not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        if is_product(node)
    ]
    assert not found, "add by index instead (np.add.at), as kv/pages/reuse.py does"
