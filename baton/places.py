"""Says where this machine keeps what was built or packed once. Imports nothing of ours: every floor may ask."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_ENV = "BATON_CACHE_DIR"


def cache_dir() -> Path:
    """Returns $BATON_CACHE_DIR, else baton in the user's cache directory."""
    named = os.environ.get(CACHE_ENV)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
