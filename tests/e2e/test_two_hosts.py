"""Two network namespaces as two hosts, mutual TLS on (bench/two_hosts.py says how)."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.two_hosts import SKIPPED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("link", [(), ("--delay-ms", "10", "--loss", "0.01")], ids=["a cable", "far, and lossy"])
def test_two_hosts_serve_each_other_and_nobody_else(link: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.two_hosts", "--requests", "20", *link],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
