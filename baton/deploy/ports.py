"""Ports for a cluster whose ports nobody chose.

Knows nothing of what listens. They are from below the ports that the kernel gives to outgoing connections, which come
and go: one of those could be taken again before the cluster binds it.
"""

from __future__ import annotations

import random
import socket

HOST = "127.0.0.1"
FIRST, LAST = 10_000, 32_000  # Linux gives out 32768 and up
TRIES = 1_000


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


def _free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
