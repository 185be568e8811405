"""Tests what loads without torch and without Ray, and that no module imports itself in a circle."""

import ast
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

TORCH_FREE = (
    "baton.router", "baton.cost", "baton.cluster", "baton.protos", "baton.prefill_worker", "baton.decode_worker",
    "baton.kv", "baton.console", "baton.launch", "baton.planner", "baton.controller", "baton.process",
    "baton.worker", "baton.router_host", "baton.dashboards", "baton.grammars", "baton.tls",
)  # fmt: skip
TORCH_FREE_ENGINE = (
    "baton.engine.sequence", "baton.engine.plan", "baton.engine.steps.sharing",
    "baton.engine.backends.paced.runner", "baton.engine.load",
)  # fmt: skip

PROBE = """
import importlib, pkgutil, sys
def below(name):
    package = importlib.import_module(name)
    yield name
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        yield found.name
for root in sys.argv[1:]:
    for name in below(root):
        importlib.import_module(name)
        heavy = {"torch", "ray", "transformers"} & set(sys.modules)
        assert not heavy, f"importing {name} loads {heavy}"
"""


@pytest.mark.parametrize("roots", [TORCH_FREE, TORCH_FREE_ENGINE], ids=["services", "engine"])
def test_these_modules_load_without_torch_and_without_ray(roots: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, *roots], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_benches_stand_without_the_tests() -> None:
    root = Path(__file__).resolve().parents[1]
    for path in (*(root / "bench").rglob("*.py"), *(root / "baton" / "bench").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found = {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
        found |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        assert not {name.split(".")[0] for name in found} & {"tests", "pytest"}, path


def test_no_import_goes_in_a_circle() -> None:
    graph = grimp.build_graph("baton")  # imports for type checkers alone count
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while leaves := {module for module, below in imports.items() if not below & imports.keys()}:
        imports = {module: below for module, below in imports.items() if module not in leaves}
    assert not imports, f"these import one another, or import those: {sorted(imports)}"


def test_no_folder_imports_another_of_its_package_in_a_circle() -> None:
    """Files and folders side by side in a package count as one each, with everything below."""
    graph = grimp.build_graph("baton")
    for package in sorted(module for module in graph.modules if graph.find_children(module)):
        rooms = graph.find_children(package)
        imports = {
            room: {
                other
                for other in rooms - {room}
                if graph.direct_import_exists(importer=room, imported=other, as_packages=True)
            }
            for room in rooms
        }
        while leaves := {room for room, below in imports.items() if not below & imports.keys()}:
            imports = {room: below for room, below in imports.items() if room not in leaves}
        assert not imports, f"in {package} these import one another, or import those: {sorted(imports)}"
