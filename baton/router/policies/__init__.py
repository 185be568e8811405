"""What a routing policy sees and answers, and how one is found by its file's name.

A policy is one file here with one pure function, ``choose(snapshot, request) -> RoutingDecision | None``: None when
nobody has room now. It knows nothing of connections, clocks, Redis or queues: the planner's simulator runs
the same file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from operator import attrgetter
from typing import Literal

import msgspec

from baton.kv.layout.bridge import can_ship
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS, WorkerInfo, WorkerLoad

Way = Literal["local", "prefill"]


class Candidate(msgspec.Struct, frozen=True):
    """Describes a worker that can be reached, and what this router itself has on it.

    ``sequences`` are this router's requests there; ``unread_tokens`` their uncached prompt tokens it still has to
    compute, in ``unread_requests`` prompts. These are exact; ``load`` is everybody's, and up to a beat old.
    ``full``: it refused somebody a moment ago. ``adapter_s``: seconds until it could have the request's adapter, 0
    where it holds it or none is asked for.
    """

    info: WorkerInfo
    load: WorkerLoad
    sequences: int = 0
    unread_requests: int = 0
    unread_tokens: int = 0
    full: bool = False
    adapter_s: float = 0.0

    @property
    def id(self) -> str:
        """Returns the worker's id."""
        return self.info.worker_id

    @property
    def waiting_tokens(self) -> int:
        """Returns the prompt tokens ahead of a newcomer, by whichever of the two sources knows of more."""
        return max(self.unread_tokens, self.load.waiting_tokens)

    @property
    def running(self) -> int:
        """Returns the sequences that it works on, by whichever of the two sources knows of more."""
        return max(self.sequences, self.load.running + self.load.waiting)


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """Describes the cluster at one moment, sorted by worker id.

    ``turn`` counts placements: what breaks ties and goes round.

    ``window_tokens`` is how many uncached tokens a worker may be handed before it has read the ones it has.
    """

    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]
    turn: int = 0
    window_tokens: int = 4096
    local_max_tokens: int = 64


class RoutingRequest(msgspec.Struct, frozen=True):
    """Describes a request as policies see it: ``tokens`` to be read (prompt and replay), ``hits`` cached blocks by
    worker.

    Workers in ``avoid`` failed this request before: they are taken only if there is nobody else. SLOs are what is
    left of them, in seconds; 0: none. ``session_worker`` decoded the session's last turn; "": no session.
    """

    tokens: int
    max_new_tokens: int
    hits: Mapping[str, int] = {}
    avoid: frozenset[str] = frozenset()
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    session_worker: str = ""

    @property
    def blocks(self) -> int:
        """Returns the blocks that the prompt takes, the partial tail included."""
        return -(-self.tokens // BLOCK_TOKENS)

    def cached(self, worker_id: str) -> int:
        """Returns the tokens that the worker is said to hold already."""
        return self.tokens - self.uncached(worker_id)

    def uncached(self, worker_id: str) -> int:
        """Returns the tokens that the worker would have to compute; one at least."""
        return max(1, self.tokens - self.hits.get(worker_id, 0) * BLOCK_TOKENS)


class Option(msgspec.Struct, frozen=True):
    """Describes a way that could be taken, with what it would cost: ``terms`` in seconds (or in the policy's own
    unit).

    ``cached_tokens``: of the prompt, what its reader is said to hold. ``fetch_from`` (a worker, at
    ``fetch_address``) holds ``fetch_blocks`` leading blocks that are cheaper for it to fetch than to compute;
    fetching is given up after ``fetch_limit_s``.
    """

    way: Way
    decode: str
    prefill: str = ""
    terms: Mapping[str, float] = {}
    cached_tokens: int = 0
    fetch_from: str = ""
    fetch_address: str = ""
    fetch_blocks: int = 0
    fetch_limit_s: float = 0.0

    @property
    def reader(self) -> str:
        """Returns the worker that computes the prompt."""
        return self.prefill or self.decode

    @property
    def cost(self) -> float:
        """Returns the sum of the terms."""
        return sum(self.terms.values())


class RoutingDecision(msgspec.Struct, frozen=True):
    """Holds the option taken and those that were weighed against it, the taken one among them.

    ``in_seconds``: terms predict seconds, so that they can be held against what is observed. ``more`` options were
    weighed and not listed.
    """

    policy: str
    taken: Option
    options: tuple[Option, ...] = ()
    in_seconds: bool = False
    more: int = 0


Policy = Callable[[ClusterSnapshot, RoutingRequest], RoutingDecision | None]


def names() -> list[str]:
    """Returns the names of the policies: the files of this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg)


def load_policy(name: str) -> Policy:
    """Returns the policy whose file is called ``name``. Raises ConfigError that lists the choices."""
    if name not in names():
        raise ConfigError(f"no routing policy {name!r}; choose one of {', '.join(names())}", "router.policy")
    policy: Policy = importlib.import_module(f"{__name__}.{name}").choose
    return policy


# ---- what every policy starts from -------------------------------------------------------------------


def has_room(worker: Candidate, uncached: int, window: int) -> bool:
    """Returns whether a prompt handed over now would be read soon: no worker gets a second one that fills the
    window.
    """
    if worker.full or worker.unread_requests == 0:
        return not worker.full
    alone = worker.unread_requests == 1 and uncached <= window
    return alone or worker.unread_tokens + uncached <= window


def fits(first: Candidate, second: Candidate) -> bool:
    """Returns whether KV made by the first can be shipped to the second."""
    a, b = first.info, second.info
    return a.fingerprint == b.fingerprint and can_ship(a.layout, b.layout)


def local_ways(snapshot: ClusterSnapshot, request: RoutingRequest) -> list[Candidate]:
    """Returns the decode workers that may run the prompt themselves: short uncached rest, or nobody else who
    could.
    """
    return [d for d in _decodes(snapshot, request) if _may_read(snapshot, request, d)]


def _may_read(snapshot: ClusterSnapshot, request: RoutingRequest, worker: Candidate) -> bool:
    uncached = request.uncached(worker.id)
    alone = not any(fits(p, worker) for p in snapshot.prefill)
    return (alone or uncached <= snapshot.local_max_tokens) and has_room(worker, uncached, snapshot.window_tokens)


def pairs(snapshot: ClusterSnapshot, request: RoutingRequest) -> Iterator[tuple[Candidate, Candidate]]:
    """Yields every (prefill, decode) that fits and has room."""
    writers = _decodes(snapshot, request)
    for p in preferred(snapshot.prefill, request.avoid):
        if has_room(p, request.uncached(p.id), snapshot.window_tokens):
            yield from ((p, d) for d in writers if fits(p, d))


def _decodes(snapshot: ClusterSnapshot, request: RoutingRequest) -> list[Candidate]:
    roomy = [d for d in snapshot.decode if d.sequences < d.info.max_batch and not d.full]
    return preferred(roomy, request.avoid)


def preferred(workers: tuple[Candidate, ...] | list[Candidate], avoid: frozenset[str]) -> list[Candidate]:
    """Returns the workers that are not in ``avoid``, or all if that leaves nobody."""
    return [w for w in workers if w.id not in avoid] or list(workers)


def cheapest_first(options: list[Option]) -> list[Option]:
    """Returns the options in order of their costs; equals as they were."""
    return sorted(options, key=attrgetter("cost"))


def least(ranked: list[Option], turn: int) -> Option:
    """Returns the first of those ranked by cost; equals take turns."""
    best = ranked[0].cost
    equals = list(takewhile(lambda option: option.cost <= best, ranked))
    return equals[turn % len(equals)]
