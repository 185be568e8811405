"""The ports at which a decode worker's I/O process receives KV besides gRPC: a TCP port and unix sockets in the
slot's directory.

Knows nothing of frames or leases; senders learn the addresses by Describe.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from baton.decode_worker.io.intake import Intake
from baton.kv.transport import cuda_ipc, nccl, nixl, shm, tcp
from baton.kv.transport.auto import AUTO
from baton.kv.wire.receiving import SocketServer
from baton.process.security import identity_of
from baton.protos.errors import ConfigError
from baton.worker.spec import ServerSpec

log = logging.getLogger("baton.worker")


def open_data_ports(
    slot: str, folder: str, server: ServerSpec, intake: Intake, stack: AsyncExitStack
) -> dict[str, str]:
    """Listens by every transport that ``server`` allows, until ``stack`` closes; returns the addresses by
    transport.

    GPU transports are offered on their own accord only if the engine shares its GPU pages. A transport that can't
    be opened is left out with a warning. Raises ConfigError if it is the one that ``server.kv_transport`` names.
    """
    path, accept, pages = Path(folder) / f"{slot}.kv", intake.accept, intake.memory.device
    identity = identity_of(server.tls, f"the KV port of {slot}", ("worker",))
    ways: dict[str, Callable[[], tuple[SocketServer, str]]] = {
        "tcp": lambda: tcp.listen(server.host, accept, server.data_port, identity),
        "shm": lambda: shm.listen(str(path), accept),
    }
    trusted = server.tls is None or server.tls.trusted_network
    if server.kv_transport == "nccl" or (pages is not None and trusted):  # it can't be encrypted
        by_name = server.kv_transport == "nccl"
        ways["nccl"] = lambda: nccl.listen(server.host, accept, pages=pages, at_once=by_name)
    if server.kv_transport == "nixl":  # by name alone, because nothing here says yet where it is quicker
        ways["nixl"] = lambda: nixl.listen(server.host, accept)
    card = path.with_suffix(".gpu")
    if server.kv_transport == "cuda_ipc" or pages is not None:
        ways["cuda_ipc"] = lambda: cuda_ipc.listen(str(card), accept, pages)
    opened: dict[str, str] = {}
    for name, listen in ways.items():
        if server.kv_transport not in (AUTO, name):
            continue
        try:
            listener, opened[name] = listen()
        except ConfigError as error:
            if server.kv_transport == name:
                raise
            log.warning("KV can't be received by %s: %s", name, error.message)
            continue
        stack.callback(listener.close)
    stack.callback(_remove, path)
    stack.callback(_remove, card)
    return opened


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
