"""A local cluster's ports: those that were asked for are free, and those that nobody chose are found.

Knows nothing of what listens. Ports that are found lie below those that the kernel gives to outgoing connections,
which come and go: one of those could be taken again before the cluster binds it.
"""

from __future__ import annotations

import os
import random
import socket

from baton.cluster.config import BatonConfig
from baton.protos.errors import ConfigError

HOST = "127.0.0.1"
FIRST, LAST = 10_000, 32_000  # Linux gives out 32768 and up
TRIES = 1_000


def dialled(host: str) -> str:
    """What reaches a server that is bound to ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)


def with_ports(config: BatonConfig) -> BatonConfig:
    """``config`` with ports that are free now; 0 takes any. Raises ConfigError naming the flag."""
    router = config.router
    ports = {
        "port": _bindable(router.host, router.port, "port", "--port"),
        "grpc_port": _bindable(router.host, router.grpc_port, "grpc_port", "--grpc-port"),
    }
    return config.model_copy(update={"router": router.model_copy(update=ports)})


def free_ports(count: int, host: str = HOST) -> list[int]:
    """``count`` different TCP ports of ``host`` that nobody listens at now. Raises OSError when there are none."""
    rng, found = random.SystemRandom(), set[int]()
    for _ in range(TRIES * count):
        if len(found) == count:
            return sorted(found)
        port = rng.randint(FIRST, LAST)
        if port not in found and _free(host, port):
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


def _free(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
