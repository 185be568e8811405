"""Ways for KV to get from worker to worker: one file each, named in ``worker.kv_transport`` by the file's name.

Knows nothing of any of them beyond their names.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from baton.kv.memory import PageMemory
    from baton.kv.transport.base import Transport

IN_PROCESS = {"loopback"}
_PARTS = {"__init__", "base", "frames", "control", "sending", "receiving", "inlet", "poller", "preflight"}


def names() -> list[str]:
    """Every transport here."""
    return sorted({path.stem for path in Path(__file__).parent.glob("*.py")} - _PARTS)


def check_name(name: str) -> str:
    """``name``, if workers of their own processes can use it. Raises ConfigError listing the choices."""
    choices = [found for found in names() if found not in IN_PROCESS]
    if name not in choices:
        raise ConfigError(
            f"worker.kv_transport {name!r} is unknown; choose one of {', '.join(choices)}", "worker.kv_transport"
        )
    return name


def sender(name: str, memory: PageMemory) -> Transport:
    """Transport ``name`` for a worker that sends pages of ``memory``."""
    made: Transport = importlib.import_module(f"{__name__}.{check_name(name)}").sender(memory)
    return made
