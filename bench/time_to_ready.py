"""Seconds from `make serve` to /ready, and from Ctrl-C to nothing left, in a fresh clone: first start, then again.

    python3 bench/time_to_ready.py [--again 3] [--port 8720]

Clones this repository to a temporary folder without a virtual environment; needs only git, make and python3.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

LIMIT_S = 900.0


def start(folder: Path, port: int) -> tuple[float, subprocess.Popen[bytes]]:
    """Seconds until /ready answers 200."""
    began = time.monotonic()
    command = ["make", "serve", f"ARGS=--port {port} --grpc-port {port + 1}"]
    cluster = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, start_new_session=True)
    while time.monotonic() - began < LIMIT_S and cluster.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1).read()
            return time.monotonic() - began, cluster
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.05)
    raise SystemExit(f"not ready: exit code {cluster.poll()}")


def stop(cluster: subprocess.Popen[bytes]) -> float:
    """Seconds from Ctrl-C to the end of the command."""
    began = time.monotonic()
    os.killpg(cluster.pid, signal.SIGINT)
    cluster.wait(60)
    return time.monotonic() - began


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes that still run from ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and str(folder) in line:
            found.append(f"{entry.name} {line[:120]}")
    return found


def main() -> None:
    """First start, then ``--again`` more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", type=int, default=3)
    parser.add_argument("--port", type=int, default=8720)
    args = parser.parse_args()
    source = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "baton"
        subprocess.run(["git", "clone", "-q", str(source), str(folder)], check=True)
        for run in range(1 + args.again):
            ready, cluster = start(folder, args.port)
            down = stop(cluster)
            time.sleep(0.5)
            left = left_behind(folder)
            name = "first" if run == 0 else f"again {run}"
            print(
                f"{name}: ready after {ready:.1f} s, down after {down:.1f} s, left behind: {left or 'nothing'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
