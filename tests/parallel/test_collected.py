"""A parallel run collects once, and its processes tell what xdist's own would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.parallel import collected

def pytest_configure(config):
    if config.getoption("numprocesses", None):
        collected.share(config)
"""
ONE = """
import os
import pytest

with open({log!r}, "a") as log:
    log.write("collected\\n")

def test_passes(tmp_path):
    (tmp_path / "mine").write_text(os.environ["PYTEST_XDIST_WORKER"])

def test_fails():
    print("said on the way")
    assert [1] == [2]

@pytest.mark.skip(reason="by its mark")
def test_is_skipped():
    pass
"""
DIES = "import os\n\ndef test_dies():\n    os._exit(3)\n"
THREAD = """
import threading
import time

threading.Thread(target=time.sleep, args=(20,), daemon=True).start()

def test_it():
    pass
"""


def run(folder: Path) -> tuple[int, str]:
    options = ["-n", "2", "--dist", "loadfile", "--max-worker-restart", "0", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment())
    return done.returncode, done.stdout + done.stderr


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {"PYTHONPATH": str(ROOT)}


def test_its_processes_share_one_collection_and_tell_what_their_tests_did(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_dies.py").write_text(DIES)
    for name in ("one", "two", "three"):
        (tmp_path / f"test_{name}.py").write_text(ONE.format(log=str(log)))
    status, said = run(tmp_path)
    assert (status, log.read_text().count("collected")) == (1, 3), said  # each module once, in one process
    assert "4 failed, 3 passed, 3 skipped" in said
    assert said.count("\nsaid on the way\n") == 3
    assert said.count("assert [1] == [2]") >= 3
    assert "crashed while running 'test_dies.py::test_dies'" in said


@pytest.mark.thorough
def test_a_module_that_cannot_be_imported_ends_the_run_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text("import not_there\n")
    status, said = run(tmp_path)
    assert status != 0
    assert "No module named 'not_there'" in said
    assert "1 error" in said


@pytest.mark.thorough
def test_a_thread_that_is_started_as_modules_are_collected_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(THREAD)
    status, said = run(tmp_path)
    assert status != 0
    assert "test_one.py starts a thread as it is collected" in said
