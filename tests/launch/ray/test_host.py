"""Tests the process that holds our end of Ray, without Ray."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import sys, threading, time
from baton.launch.ray.host import end_with
threading.Thread(target=end_with, args=(int(sys.argv[1]), 0.1), daemon=True).start()
print("waits", flush=True)
time.sleep(600)  # a call of Ray that doesn't return
"""


def test_a_call_that_does_not_return_ends_with_the_raylet_so_that_the_process_can_be_started_again() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as raylet:
        command = [sys.executable, "-c", STUCK, str(raylet.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as host:
            assert host.stdout is not None
            assert host.stdout.readline() == "waits\n"
            assert host.poll() is None
            raylet.kill()
            raylet.wait()
            assert host.wait(60) == 1
