"""A local cluster's ports: checks that requested ones are free, and finds free ones.

Knows nothing of what listens. Ports that are found lie below those that the kernel gives to outgoing connections,
which come and go: one of those could be taken again before the cluster binds it. They stay bound here for a minute,
in a way that lets servers have them, so that another cluster that comes up meanwhile finds others.
"""

from __future__ import annotations

import os
import random
import socket
import time

from baton.cluster.config import BatonConfig
from baton.protos.errors import ConfigError

HOST = "127.0.0.1"
FIRST, LAST = 10_000, 32_000  # Linux gives out 32768 and up
TRIES = 1_000  # ports that are tried at most, for each one wanted
KEPT_S = 60.0  # longer than a cluster takes to come up

_kept: list[tuple[float, socket.socket]] = []  # when each was bound; touched by one thread at a time


def dialled(host: str) -> str:
    """Returns the host by which a client on this machine reaches a server bound to ``host``: 127.0.0.1 for
    0.0.0.0.
    """
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)


def with_ports(config: BatonConfig) -> BatonConfig:
    """Returns ``config`` with the router's ports, after checking that they are free; a port 0 is replaced by a free
    one.

    Raises ConfigError naming the flag of a port that is taken.
    """
    router = config.router
    ports = {
        "port": _bindable(router.host, router.port, "port", "--port"),
        "grpc_port": _bindable(router.host, router.grpc_port, "grpc_port", "--grpc-port"),
    }
    return config.model_copy(update={"router": router.model_copy(update=ports)})


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Returns ``count`` different free TCP ports of ``host``, sorted, for servers that bind them soon.

    No other call finds them for KEPT_S. Raises OSError if there are too few.
    """
    rng, found = random.SystemRandom(), set[int]()
    _forget()
    for _ in range(TRIES * count):
        if len(found) == count:
            return sorted(found)
        port = rng.randint(FIRST, LAST)
        if (claim := _claimed(host, port)) is not None:
            _kept.append((time.monotonic(), claim))
            found.add(port)
    raise OSError(f"no {count} free ports of {host} between {FIRST} and {LAST}")


def _bindable(host: str, port: int, key: str, flag: str) -> int:
    if not port:
        return free_ports(1, host)[0]
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{key} {port} on {host} can't be used ({os.strerror(error.errno or 0)}): choose another with "
                f"{flag} N, or BATON_ROUTER__{key.upper()}=N",
                f"router.{key}",
            ) from None
    return port


def _claimed(host: str, port: int) -> socket.socket | None:
    """Binds ``port`` where nobody has it. From then on only who sets SO_REUSEADDR, as servers do, can bind it."""
    claim = socket.socket(_family(host))
    try:
        claim.bind((host, port))  # without SO_REUSEADDR, which would find the ports that others have claimed
    except OSError:
        claim.close()
        return None
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return claim


def _forget() -> None:
    while _kept and time.monotonic() - _kept[0][0] > KEPT_S:
        _kept.pop(0)[1].close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
