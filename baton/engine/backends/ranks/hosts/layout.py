"""Decides which of a worker's ranks run on which host.

Knows nothing of processes or connections. Host 0 is the lead's; each host has consecutive ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.config import EngineConfig
from baton.protos.errors import ConfigError

FIELD = "worker.rank_hosts"
MOST_HOSTS = 16  # links.h


def ranks_on(count: int, hosts: int, host: int) -> range:
    """Returns the numbers of the ranks on ``host`` if ``count`` ranks are dealt among ``hosts`` hosts."""
    return range(count * host // hosts, count * (host + 1) // hosts)


def hosts_of_ranks(count: int, hosts: int) -> tuple[int, ...]:
    """Returns the host of each of ``count`` ranks."""
    return tuple(host for host in range(hosts) for _ in ranks_on(count, hosts, host))


def places_of_ranks(count: int, addresses: Sequence[str]) -> tuple[str, ...]:
    """Returns where each of ``count`` ranks runs: "" on the lead's host, else at one of ``addresses``; () for a
    worker of one rank.
    """
    places = ("", *addresses)
    return tuple(places[host] for host in hosts_of_ranks(count, len(places))) if count > 1 else ()


def most_on_one(config: EngineConfig) -> int:
    """Returns the largest number of ranks that one host of a worker has."""
    return -(-config.widths.count // config.hosts)


def require_hosts(config: EngineConfig) -> None:
    """Checks that each host has a rank. Raises ConfigError."""
    count, hosts = config.widths.count, config.hosts
    if hosts > MOST_HOSTS:
        raise ConfigError(f"{FIELD} names {hosts - 1} hosts; {MOST_HOSTS - 1} at most are known", FIELD)
    if hosts > count:
        text = f"{FIELD} names {hosts - 1} hosts beside the worker's own, and it has {count} ranks"
        raise ConfigError(f"{text}; raise worker.pp or worker.tp to {hosts} or more, or name fewer hosts", FIELD)
