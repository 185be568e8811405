"""Tests the seam itself: what an op's folder must hold, and what happens when a backend lacks an op."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import baton.kernels
from baton.kernels.registry import implementation, kernels, ops

FOLDER = Path(baton.kernels.__file__).parent


@pytest.mark.parametrize("op", ops())
def test_every_op_has_a_reference_function_of_its_own_name_with_a_docstring(op: str) -> None:
    function = implementation(op)
    assert function.__name__ == op
    assert function.__doc__


def test_a_backend_without_an_op_falls_back_to_the_reference() -> None:
    assert implementation("linear", "no_such_backend") is implementation("linear")


def test_the_namespace_holds_every_op() -> None:
    assert set(vars(kernels())) == set(ops())


def test_kernels_import_nothing_of_ours_but_kernels() -> None:
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            ours = (module or "").startswith("baton.") and module != "baton.places"  # which imports nothing of ours
            assert not ours or module.startswith("baton.kernels"), path
