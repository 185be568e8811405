"""A suite in forked processes: each test runs once and in its order, failures are told, a death costs one test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from tests import cpu_times, parallel

def pytest_addoption(parser):
    parallel.add_option(parser)
    parser.addoption(cpu_times.OPTION, action="store_true")

def pytest_configure(config):
    parallel.configure(config)
    if config.getoption(cpu_times.OPTION):
        config.pluginmanager.register(cpu_times.CpuTimes())
"""
FILE = """
import os, signal, time, warnings
import pytest

@pytest.fixture(scope="module")
def shared():
    yield os.getpid()
    with open({log!r}, "a") as log:
        log.write("down {name}\\n")

@pytest.mark.parametrize("at", range(3))
def test_it(shared, at, tmp_path):
    print("said by {name}", at)
    with open({log!r}, "a") as log:
        log.write(f"{name} {{at}} {{os.getpid() == shared}}\\n")
    {body}
"""


def suite(folder: Path, bodies: dict[str, str], *options: str) -> tuple[str, list[str]]:
    """Runs files of three tests each in two processes; returns pytest's words, and what the tests logged."""
    (folder / "conftest.py").write_text(CONFTEST)
    log = folder / "log"
    for name, body in bodies.items():
        (folder / f"test_{name}.py").write_text(FILE.format(log=str(log), name=name, body=body))
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(folder), "-p", "no:schemathesis"]
    done = subprocess.run(
        [*command, "-q", "--processes", "2", *options, str(folder)], capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr, log.read_text().splitlines()


def test_each_test_runs_once_in_order_of_its_file_and_is_told_of(tmp_path: Path) -> None:
    bodies = {"a": "assert at != 1", "b": "warnings.warn('odd')", "c": "at == 2 and pytest.skip('no')"}
    said, logged = suite(tmp_path, bodies, "--cpu-times", "-rs")
    assert "1 failed, 7 passed, 1 skipped, 3 warnings" in said
    for name in bodies:
        assert [line for line in logged if name in line.split()] == [
            *(f"{name} {at} True" for at in range(3)), f"down {name}",
        ]  # fmt: skip
    assert re.search(r"said by a 1\n", said)
    assert not re.search(r"said by [bc]", said)
    assert "UserWarning: odd" in said
    assert re.search(r"SKIPPED \[1\] .*test_c.py:\d+: no", said)
    assert re.search(r"CPU seconds; the files", said)


def test_a_process_that_dies_costs_the_test_that_it_died_in_and_is_replaced(tmp_path: Path) -> None:
    bodies = {"a": "at == 1 and os.kill(os.getpid(), signal.SIGKILL)", "b": "", "c": ""}
    said, logged = suite(tmp_path, bodies)
    assert "1 failed, 8 passed" in said
    assert "the process that ran this test ended with signal SIGKILL" in said
    assert sorted(line for line in logged if "down" not in line) == sorted(
        f"{name} {at} True" for name in "abc" for at in range(3)
    )


def test_at_the_first_failure_what_runs_is_taken_down_and_nothing_else_begins(tmp_path: Path) -> None:
    bodies = {"a": "assert False", "b": "time.sleep(60)", "c": ""}
    said, logged = suite(tmp_path, bodies, "-x")
    assert "1 failed in" in said
    assert {"down a", "down b"} >= set(logged) - {"a 0 True", "b 0 True"} >= {"down a"}
