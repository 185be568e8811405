import os
import resource
import subprocess
import sys

import pytest

from baton.process.processes import end_sessions, kill_session, session_members, wait_exit

FAMILY = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
FORKING = (
    "import subprocess; print('up', flush=True); kept = [subprocess.Popen(['sleep', '60']) for _ in range(2000)]"
)
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def start(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_a_session_ends_with_its_children() -> None:
    leader = start(FAMILY)
    assert len(session_members(leader.pid)) == 2
    end_sessions([leader.pid], 2.0)
    leader.wait(30)
    assert session_members(leader.pid) == []


def test_what_is_forked_while_a_session_is_killed_is_killed_too() -> None:
    leader = start(FORKING)
    kill_session(leader.pid)
    leader.wait(30)
    assert session_members(leader.pid) == []


def test_what_ignores_sigterm_is_killed_after_the_grace() -> None:
    leader = start(STUBBORN)
    end_sessions([leader.pid], 0.2)
    assert leader.wait(30) == -9


def test_a_process_that_is_gone_needs_no_waiting() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert wait_exit(process.pid, 60)


def test_a_process_is_waited_for_with_many_descriptors_open() -> None:
    """A long-lived supervisor's descriptors pass 1,023, where select() ends."""
    limit, ceiling = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ceiling < 1200:
        pytest.skip("this machine allows fewer than 1,200 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, 1200), ceiling))
    process, null = subprocess.Popen(["sleep", "60"]), os.open(os.devnull, os.O_RDONLY)
    copies = [os.dup(null) for _ in range(1100)]
    try:
        assert not wait_exit(process.pid, 0.01)
        process.kill()
        assert wait_exit(process.pid, 60)
    finally:
        for fd in [null, *copies]:
            os.close(fd)
        process.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, ceiling))
