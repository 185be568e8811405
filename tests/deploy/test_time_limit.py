import subprocess
import sys
import time

HANGS = """
import threading, time
from baton.deploy.time_limit import end_within
threading.Thread(target=lambda: time.sleep(60), name="stuck").start()  # the interpreter waits for it at its end
end_within(0.3)
"""
LEAVES = """
import threading, time
from baton.deploy.time_limit import end_with, end_within
def main():
    end_within(0.5)
    time.sleep(0.1)
    end_within(60)
    time.sleep(0.6)
    threading.Thread(target=lambda: time.sleep(60)).start()
    print("said")
    return {status}
end_with(main)
"""


def run(code: str) -> tuple[subprocess.CompletedProcess[str], float]:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return done, time.monotonic() - begun


def test_what_hangs_is_ended_with_its_stacks_in_the_log() -> None:
    done, seconds = run(HANGS)
    assert done.returncode == 1
    assert "time.sleep" in done.stderr or "<lambda>" in done.stderr
    assert seconds < 20


def test_what_is_done_in_time_goes_on_and_leaves_without_its_threads() -> None:
    done, seconds = run(LEAVES.format(status="7"))
    assert (done.returncode, done.stdout) == (7, "said\n")
    assert seconds < 20


def test_what_fails_says_why_and_leaves_without_its_threads() -> None:
    done, seconds = run(LEAVES.format(status="1 / 0"))
    assert (done.returncode, done.stdout) == (1, "said\n")
    assert "ZeroDivisionError" in done.stderr
    assert seconds < 20
