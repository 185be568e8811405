"""Workers that were started by hand take cards that nobody has; a card is free again when its last holder ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.backends.cuda.card_locks import TakenCard, share, take
from baton.protos.errors import ConfigError

CARDS = ("a", "b", "c", "d")
# Takes two cards, leaves the second to a child, as ranks do, says both, and waits for the end of its input.
LEAD = """
import subprocess, sys
from pathlib import Path
from baton.engine.backends.cuda.card_locks import take
taken = take(("a", "b", "c", "d"), 2, 0, Path(sys.argv[1]))
follower = subprocess.Popen(["sleep", "60"], pass_fds=[taken[1].fd])
taken[1].release()
print(*(card.index for card in taken), follower.pid, flush=True)
sys.stdin.read()
"""


def indices(taken: list[TakenCard]) -> list[int]:
    return [card.index for card in taken]


def test_each_worker_gets_cards_that_nobody_has_and_too_few_are_refused_with_who_has_them(tmp_path: Path) -> None:
    first, second = (take(CARDS, count, 0, tmp_path) for count in (2, 1))
    assert (indices(first), indices(second)) == ([0, 1], [2])
    holders = ", ".join(f"card {index}: process {os.getpid()}" for index in range(3))
    with pytest.raises(ConfigError) as caught:
        take(CARDS, 2, 0, tmp_path)
    assert caught.value.param == "tp"
    assert f"of the 4 that this process sees other workers have 3 ({holders})" in caught.value.message
    assert "CUDA_VISIBLE_DEVICES" in caught.value.message
    first[1].release()
    assert indices(take(CARDS, 2, 0, tmp_path)) == [1, 3]  # what was refused took none


def test_a_killed_workers_cards_are_free_once_each_of_its_ranks_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lead:
        assert lead.stdout is not None
        *cards, follower = map(int, lead.stdout.readline().split())
        assert cards == [0, 1]
        lead.kill()
        lead.wait()
        pidfd = os.pidfd_open(follower)
        assert indices(take(CARDS, 3, 0, tmp_path)) == [0, 2, 3]  # the follower still has its own
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        assert indices(take(CARDS, 1, 60, tmp_path)) == [1]


def test_workers_of_one_card_share_it_and_ranks_take_others(tmp_path: Path) -> None:
    both = [share(CARDS, 0, tmp_path) for _ in range(2)]
    ranks = take(CARDS, 2, 0, tmp_path)
    assert indices(ranks) == [1, 2]
    for card in both:
        card.release()
    with pytest.raises(ConfigError, match=rf"card 0 is one of another worker's ranks \(process {os.getpid()}\)"):
        share(CARDS[1:], 0, tmp_path)
    assert indices(take(CARDS, 1, 0, tmp_path)) == [0]


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    for where in (tmp_path / "open", tmp_path / "link"):
        (tmp_path / "there").mkdir(exist_ok=True, mode=0o700)
        where.symlink_to(tmp_path / "there") if where.name == "link" else where.mkdir()
        if where.name == "open":
            where.chmod(0o777)
        with pytest.raises(ConfigError, match="isn't this user's alone"):
            take(CARDS, 1, 0, where)
    with pytest.raises(ConfigError, match=f"can't be made: .*No such file or directory: '{tmp_path}"):
        take(CARDS, 1, 0, tmp_path / "no" / "folder")
