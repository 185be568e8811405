"""The folder in which one run keeps its sockets, locks and logs.

Knows nothing of what writes them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TextIO

from baton.cluster.config import BatonConfig
from baton.protos.errors import ConfigError

CLAIM = "claim"  # the file that a run locks in its folder
MAX_PATH = 38  # characters of a run's folder, because Ray's sockets add 65 and a unix socket's path ends at 107


def choose_root(config: BatonConfig) -> Path:
    """Returns ``cluster.run_dir``, or else a new temporary folder.

    Raises ConfigError if its path is too long for Ray's sockets.
    """
    chosen = config.cluster.run_dir
    root = Path(chosen).resolve() if chosen else Path(tempfile.mkdtemp(prefix="baton-"))
    if len(str(root)) > MAX_PATH:
        raise ConfigError(
            f"cluster.run_dir {root} is longer than {MAX_PATH} characters, too long for the sockets "
            "inside: choose a shorter one (or a shorter TMPDIR)",
            "cluster.run_dir",
        )
    return root


class RunFiles:
    """Holds the paths of a run's files and folders under ``root``, and creates the folders.

    ``alone`` claims the folder until ``tidy`` or the process's end; ConfigError is raised where another process has
    claimed it. Whoever comes after one that was killed may have it, and finds its workers. ConfigError is raised as
    well where the folder can't be made.
    """

    def __init__(self, root: Path, alone: bool = False) -> None:
        self.root = root
        self._claim = _claimed(root) if alone else None
        self.redis = self.root / "redis"
        self.slots = self.root / "slots"
        self.logs = self.root / "logs"
        self.ray = self.root / "ray"
        self.config = self.root / "config.json"
        self.placement = self.root / "placement.json"
        _make(self.root)
        for folder in (self.redis, self.slots, self.logs, self.ray):
            _make(folder)
        (self.slots / "closed").unlink(missing_ok=True)

    def tidy(self) -> None:
        """Deletes the run's files, except for the logs, and gives the folder up."""
        for folder in (self.redis, self.slots, self.ray):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.config, self.placement):
            file.unlink(missing_ok=True)
        if self._claim is not None:
            (self.root / CLAIM).unlink(missing_ok=True)
            self._claim.close()


def _make(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # specs may hold a password of Redis
    except OSError as error:
        text = f"cluster.run_dir {root} can't be made ({error.strerror}): name another folder (--run-dir)"
        raise ConfigError(text, "cluster.run_dir") from None


def _claimed(root: Path) -> TextIO:
    """Returns the open, locked file that claims ``root``; it holds our pid. Raises ConfigError if another process
    has it.
    """
    _make(root)
    path = root / CLAIM
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = file.read().strip()
        file.close()
        raise ConfigError(
            f"cluster.run_dir {root} is in use by the cluster of process {who}: choose another one, or leave "
            "it out (is BATON_CLUSTER__RUN_DIR set?)",
            "cluster.run_dir",
        ) from None
    if not path.exists() or not path.samefile(f"/proc/self/fd/{file.fileno()}"):  # its owner ended just now
        file.close()
        return _claimed(root)
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
