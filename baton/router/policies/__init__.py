"""Routing policies: the snapshot and request that they see, the decision that they return, and how one is loaded by
name.

A policy is one module here with one pure function, ``choose(snapshot, request) -> RoutingDecision | None``: None if
no worker has room now. It knows nothing of connections, clocks, Redis or queues: the planner's simulator runs the
same file.
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
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import BLOCK_TOKENS, WorkerInfo

Way = Literal["local", "prefill"]


class Candidate(msgspec.Struct, frozen=True):
    """Describes a reachable worker, and what this router itself has placed on it.

    ``sequences``: this router's requests there; ``pending_tokens``: their uncached prompt tokens that are still to
    be computed, in ``pending_prompts`` prompts. These are exact; ``load`` counts all routers' requests and may be a
    heartbeat old. ``full``: it refused a request a moment ago. ``adapter_s``: seconds until it could have the
    request's adapter, 0 if it has it or none is needed.
    """

    info: WorkerInfo
    load: WorkerLoad
    sequences: int = 0
    pending_prompts: int = 0
    pending_tokens: int = 0
    full: bool = False
    adapter_s: float = 0.0

    @property
    def id(self) -> str:
        """Returns the worker's id."""
        return self.info.worker_id

    @property
    def waiting_tokens(self) -> int:
        """Returns the prompt tokens to be computed there before a new request's: the larger of this router's count
        and the worker's.
        """
        return max(self.pending_tokens, self.load.waiting_tokens)

    @property
    def running(self) -> int:
        """Returns the sequences on the worker: the larger of this router's count and the worker's."""
        return max(self.sequences, self.load.running + self.load.waiting)


class ClusterSnapshot(msgspec.Struct, frozen=True):
    """Describes the cluster at one moment, workers sorted by id.

    ``turn`` counts placements, to break ties by turns. ``window_tokens``: uncached tokens that a worker may be
    given beyond those it is computing. ``local_max_tokens``: uncached tokens up to which a decode worker prefills
    itself.
    """

    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]
    turn: int = 0
    window_tokens: int = 4096
    local_max_tokens: int = 64


class RoutingRequest(msgspec.Struct, frozen=True):
    """Describes a request as policies see it: ``tokens`` to prefill (prompt and replayed outputs), ``hits`` cached
    blocks by worker id.

    Workers in ``avoid`` failed this request before and are taken only if there is no other. SLOs are the seconds
    left of them, 0 for none. ``session_worker`` decoded the session's last turn; "": no session.
    """

    tokens: int
    max_new_tokens: int  # output tokens at most
    hits: Mapping[str, int] = {}
    avoid: frozenset[str] = frozenset()
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    session_worker: str = ""

    @property
    def blocks(self) -> int:
        """Returns the KV blocks that the prompt takes, a partial last one included."""
        return -(-self.tokens // BLOCK_TOKENS)

    def cached(self, worker_id: str) -> int:
        """Returns the tokens that the worker is said to have cached."""
        return self.tokens - self.uncached(worker_id)

    def uncached(self, worker_id: str) -> int:
        """Returns the tokens that the worker would have to compute, at least 1."""
        return max(1, self.tokens - self.hits.get(worker_id, 0) * BLOCK_TOKENS)


class Option(msgspec.Struct, frozen=True):
    """Describes one way to serve a request, with its cost: ``terms`` in seconds (or in the policy's own unit).

    ``cached_tokens``: tokens of the prompt that its reader is said to have cached. ``fetch_from`` (a worker, at
    ``fetch_address``) has ``fetch_blocks`` leading blocks that are cheaper to fetch than to compute; the fetch is
    abandoned after ``fetch_limit_s``.
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
        """Returns the id of the worker that prefills the prompt."""
        return self.prefill or self.decode

    @property
    def cost(self) -> float:
        """Returns the sum of the cost terms."""
        return sum(self.terms.values())


class RoutingDecision(msgspec.Struct, frozen=True):
    """Holds the option taken and the options considered, the taken one among them.

    ``in_seconds``: terms predict seconds, so that they can be compared with what is observed. ``more`` options were
    considered but are not listed.
    """

    policy: str
    taken: Option
    options: tuple[Option, ...] = ()
    in_seconds: bool = False
    more: int = 0


Policy = Callable[[ClusterSnapshot, RoutingRequest], RoutingDecision | None]


def names() -> list[str]:
    """Returns the names of the routing policies: the modules of this package."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg)


def load_policy(name: str) -> Policy:
    """Returns the policy whose file is called ``name``. Raises ConfigError that lists the choices."""
    if name not in names():
        raise ConfigError(f"no routing policy {name!r}; choose one of {', '.join(names())}", "router.policy")
    policy: Policy = importlib.import_module(f"{__name__}.{name}").choose
    return policy


# ---- what every policy starts from -------------------------------------------------------------------


def has_room(worker: Candidate, uncached: int, window: int) -> bool:
    """Returns whether a prompt of ``uncached`` tokens could be given to the worker now: beyond one running prompt,
    at most ``window`` tokens may wait there.
    """
    if worker.full or worker.pending_prompts == 0:
        return not worker.full
    alone = worker.pending_prompts == 1 and uncached <= window
    return alone or worker.pending_tokens + uncached <= window


def fits(first: Candidate, second: Candidate, tokens: int = 0) -> bool:
    """Returns whether KV of a prompt of ``tokens`` tokens that ``first`` computes can be sent to ``second``: equal
    weights, compatible layouts, and pages for whole blocks if ``second`` takes no pages by window.
    """
    a, b = first.info, second.info
    if bool(a.layout.windows) != bool(b.layout.windows):
        whole = -(-tokens // a.layout.block_tokens) * len(a.layout.windows)
        if not a.bridges_windows or whole > a.pages:
            return False
    return a.fingerprint == b.fingerprint and can_ship(a.layout, b.layout)


def local_ways(snapshot: ClusterSnapshot, request: RoutingRequest) -> list[Candidate]:
    """Returns the decode workers that may prefill the prompt themselves: few tokens are uncached, or no prefill
    worker fits.
    """
    return [d for d in _decodes(snapshot, request) if _may_read(snapshot, request, d)]


def _may_read(snapshot: ClusterSnapshot, request: RoutingRequest, worker: Candidate) -> bool:
    uncached = request.uncached(worker.id)
    alone = not any(fits(p, worker, request.tokens) for p in snapshot.prefill)
    return (alone or uncached <= snapshot.local_max_tokens) and has_room(worker, uncached, snapshot.window_tokens)


def pairs(snapshot: ClusterSnapshot, request: RoutingRequest) -> Iterator[tuple[Candidate, Candidate]]:
    """Yields every (prefill worker, decode worker) that fit each other and have room for the request."""
    writers = _decodes(snapshot, request)
    able = [p for p in snapshot.prefill if any(fits(p, d, request.tokens) for d in writers)]
    for p in preferred(able, request.avoid):
        if has_room(p, request.uncached(p.id), snapshot.window_tokens):
            yield from ((p, d) for d in writers if fits(p, d, request.tokens))


def _decodes(snapshot: ClusterSnapshot, request: RoutingRequest) -> list[Candidate]:
    clear_full = [d for d in snapshot.decode if d.sequences < d.info.max_batch and not d.full]
    return preferred(clear_full, request.avoid)


def preferred(workers: tuple[Candidate, ...] | list[Candidate], avoid: frozenset[str]) -> list[Candidate]:
    """Returns the workers whose ids are not in ``avoid``, or all if none would be left."""
    return [w for w in workers if w.id not in avoid] or list(workers)


def cheapest_first(options: list[Option]) -> list[Option]:
    """Returns the options sorted by cost; the sort is stable."""
    return sorted(options, key=attrgetter("cost"))


def least(ranked: list[Option], turn: int) -> Option:
    """Returns the cheapest of ``ranked``, options sorted by cost; among equally cheap ones, number ``turn`` modulo
    their count.
    """
    best = ranked[0].cost
    equals = list(takewhile(lambda option: option.cost <= best, ranked))
    return equals[turn % len(equals)]
