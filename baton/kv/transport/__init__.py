"""Lists the KV transports between workers: each is one module of this package, named in ``worker.kv_transport``.

Knows nothing of any of them beyond their names.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from baton.kv.memory.host_pages import PageMemory
    from baton.kv.wire.base import Transport
    from baton.tls.identity import Identity, TlsFiles

IN_PROCESS = {"loopback"}
SAME_HOST = {"shm", "cuda_ipc"}  # over unix sockets and shared memory, so the kernel identifies the peer
ENCRYPTED = {"grpc", "tcp"}
# Those that take blocks from a card. Others open no context there, because it costs memory.
FROM_CARD = {"auto", "cuda_ipc", "nccl"}


def names() -> list[str]:
    """Returns the name of every transport: the modules of this package, sorted."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__))


def check_name(name: str) -> str:
    """Returns ``name`` if it is a transport between separate worker processes. Raises ConfigError listing the
    choices otherwise.
    """
    choices = [found for found in names() if found not in IN_PROCESS]
    if name not in choices:
        raise ConfigError(
            f"worker.kv_transport {name!r} is unknown; choose one of {', '.join(choices)}", "worker.kv_transport"
        )
    return name


def check_secured(name: str, tls: TlsFiles | None) -> str:
    """Returns ``name`` if that transport may carry KV under the TLS settings ``tls``. Raises ConfigError if it
    can't be encrypted and has to be.
    """
    if tls is None or tls.trusted_network or name in ENCRYPTED | SAME_HOST | IN_PROCESS | {"auto"}:
        return name
    raise ConfigError(
        f"worker.kv_transport {name} can't be encrypted, and TLS is on: choose one of auto, "
        f"{', '.join(sorted(ENCRYPTED | SAME_HOST & set(names())))}, or declare the network between the workers "
        "trusted ([tls] trusted_network = true)",
        "worker.kv_transport",
    )


def sender(name: str, memory: PageMemory, identity: Identity | None = None) -> Transport:
    """Returns the transport ``name`` for a worker that sends pages of ``memory``, encrypted if it can be and
    ``identity`` is given.

    Raises ConfigError if the name is unknown, or if TLS is on, the transport can't be encrypted and the network
    isn't declared trusted.
    """
    check_secured(check_name(name), identity.files if identity else None)
    module = importlib.import_module(f"{__name__}.{name}")
    made: Transport = module.sender(memory, identity) if name in ENCRYPTED else module.sender(memory)
    return made
