"""Says in words how many ranks a worker has and where they run, for ``baton workers`` and ``baton explain``.

Knows nothing of how ranks share a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.markup import escape

HERE = "its own host"


def widths_in_words(widths: Mapping[str, int]) -> str:
    """Returns a worker's widths, as "tp 2 x pp 2"; "" for a worker of one rank.

    The ranks that divide columns are those that divide experts, if both do: "tp/ep 2" are two.
    """
    shared = "ep" in widths and widths.get("tp") == widths["ep"]
    named = {"tp/ep" if shared and name == "tp" else name: count for name, count in widths.items()}
    return " x ".join(f"{name} {count}" for name, count in named.items() if not (shared and name == "ep"))


def by_host(hosts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each host of a worker's ranks and their numbers, as ("10.0.0.2:7100", "2-3"); ``hosts`` is by rank, ""
    for the worker's own.
    """
    for host, numbered in groupby(enumerate(hosts), key=lambda each: each[1]):
        ranks = [rank for rank, _ in numbered]
        yield escape(host) or HERE, f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def ranks_in_words(widths: Mapping[str, int], hosts: Sequence[str]) -> str:
    """Returns a worker's widths and, where its ranks run on several hosts, which of them runs where."""
    places = list(by_host(hosts))
    text = widths_in_words(widths)
    if len(places) < 2:
        return text
    return f"{text}, " + ", ".join(f"rank{'s' * ('-' in ranks)} {ranks} on {host}" for host, ranks in places)
