"""Several router processes on the same ports: started, restarted, ended together.

Knows nothing of requests. The kernel spreads connections over the processes (SO_REUSEPORT); what one of them must
know of another (quotas, decision records, batch jobs) is in Redis.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from baton.cluster.config import BatonConfig, RouterConfig
from baton.process.children import ChildProcess, python
from baton.protos.errors import ConfigError
from baton.tasks.lasting import lasting

GRACE_S = 2.0  # seconds beyond the router's own grace before a process is killed
log = logging.getLogger("baton.router")


async def run_pool(config: BatonConfig, path: Path, stop: asyncio.Event) -> None:
    """Runs ``config.router.processes`` router processes until ``stop``, restarting those that die; ``path`` is the
    config file.

    Raises ConfigError if a port is taken.
    """
    require_free(config.router)
    children = [ChildProcess(_command(path, i), _log_file(path, i)) for i in range(config.router.processes)]
    for child in children:
        await child.start()
    keeping = [lasting(partial(c.keep, _note(i), _nothing), "router processes") for i, c in enumerate(children)]
    try:
        await stop.wait()
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await asyncio.gather(*(c.stop(config.router.shutdown_grace_s + GRACE_S) for c in children))


def require_free(router: RouterConfig) -> None:
    """Raises ConfigError if the router's ports are in use: SO_REUSEPORT alone would not tell."""
    for key, port in (("port", router.port), ("grpc_port", router.grpc_port)):
        family = socket.AF_INET6 if ":" in router.host else socket.AF_INET
        try:
            socket.create_server((router.host, port), family=family).close()
        except OSError as error:
            text = f"port {port} on {router.host} can't be had ({error.strerror}): choose another router.{key}"
            raise ConfigError(text, f"router.{key}") from None


def _command(path: Path, index: int) -> list[str]:
    return python("baton.router_host.main", "--config", str(path), "--index", str(index))


def _log_file(path: Path, index: int) -> Path:
    logs = path.parent / "logs"
    return (logs if logs.is_dir() else path.parent) / f"router-{index}.log"


def _note(index: int) -> Callable[[str], None]:
    return lambda what: log.warning("router process %d %s; starting it again", index, what)


async def _nothing(_: asyncio.subprocess.Process) -> None:
    return None
