"""The folder in which one run keeps its sockets, locks and logs.

Knows nothing of what writes them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from baton.cluster.config import BatonConfig
from baton.protos.errors import ConfigError

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
    """Holds the paths of a run's files and folders under ``root``, and creates the folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.redis = self.root / "redis"
        self.slots = self.root / "slots"
        self.logs = self.root / "logs"
        self.ray = self.root / "ray"
        self.config = self.root / "config.json"
        self.placement = self.root / "placement.json"
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # specs may hold a password of Redis
        for folder in (self.redis, self.slots, self.logs, self.ray):
            folder.mkdir(exist_ok=True)
        (self.slots / "closed").unlink(missing_ok=True)

    def tidy(self) -> None:
        """Deletes the run's files, except for the logs."""
        for folder in (self.redis, self.slots, self.ray):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.config, self.placement):
            file.unlink(missing_ok=True)
