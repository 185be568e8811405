"""Where one run keeps its sockets, locks and logs.

Knows nothing of what writes them. The path is short on purpose: unix sockets end at 107 bytes, and Ray adds 65.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from baton.cluster.config import BatonConfig
from baton.protos.errors import ConfigError

MAX_PATH = 38


class RunFiles:
    """The folders of a run, made at once."""

    def __init__(self, config: BatonConfig) -> None:
        chosen = config.cluster.run_dir
        self.root = Path(chosen).resolve() if chosen else Path(tempfile.mkdtemp(prefix="baton-"))
        if len(str(self.root)) > MAX_PATH:
            raise ConfigError(
                f"cluster.run_dir {self.root} is longer than {MAX_PATH} characters, too long for the sockets "
                "inside: choose a shorter one (or a shorter TMPDIR)",
                "cluster.run_dir",
            )
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
        """Keep the logs, drop the rest."""
        for folder in (self.redis, self.slots, self.ray):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.config, self.placement):
            file.unlink(missing_ok=True)
