import subprocess
import sys

HANGS = """
import threading, time
from baton.process.time_limit import end_within
threading.Thread(target=lambda: time.sleep(60), name="stuck").start()  # the interpreter waits for it at its end
end_within(0.3)
"""
LEAVES = """
import threading, time
from baton.process.time_limit import end_with, end_within
def main():
    end_within(2.0)
    end_within(60)
    time.sleep({past_s})
    threading.Thread(target=lambda: time.sleep(60)).start()
    print("said")
    return {status}
end_with(main)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Returns the outcome of ``code``; its threads would end by themselves only later."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55, check=False)


def test_what_hangs_is_ended_with_its_stacks_in_the_log() -> None:
    done = run(HANGS)
    assert done.returncode == 1
    assert "time.sleep" in done.stderr or "<lambda>" in done.stderr


def test_what_is_done_in_time_goes_on_and_leaves_without_its_threads() -> None:
    done = run(LEAVES.format(status="7", past_s=2.2))
    assert (done.returncode, done.stdout) == (7, "said\n")


def test_what_fails_says_why_and_leaves_without_its_threads() -> None:
    done = run(LEAVES.format(status="1 / 0", past_s=0))
    assert (done.returncode, done.stdout) == (1, "said\n")
    assert "ZeroDivisionError" in done.stderr
