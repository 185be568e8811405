"""Scenarios: the cluster, the requests and the faults of a simulated run, all drawn from one seed.

A scenario is data. It can be printed, replayed, and made smaller by leaving parts out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import msgspec

from baton.drill.checks.oracle import VOCABULARY
from baton.drill.parts.network import KEEPALIVE_S
from baton.protos.nouns import Grammar, Sampling
from baton.router.dispatch.runner import DispatchSettings

FaultKind = Literal[
    "kill", "engine_dies", "stuck", "slow", "cut", "cut_one_way", "break", "index_lies", "roster_silent",
    "router_dies", "redis_stalls", "redis_flushed", "redis_restarts", "redis_forgets", "clock_jumps",
    "tier_slow", "tier_fails", "role", "ratio", "hold", "leave", "weights", "cancel_again",
]  # fmt: skip
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
HINDERING = ("cut", "cut_one_way", "stuck", "slow", "tier_slow")  # faults that delay the word that a client left
ENDING = ("kill", "engine_dies", "leave")  # faults that end a worker, and hinder nobody else
GONE_S = 3.0  # seconds that the word that a client left takes at most, without such a fault
Phase = Literal["", "reading", "admitted", "receiving", "writing"]
PHASES: tuple[Phase, ...] = ("reading", "admitted", "receiving", "writing")
# Faults that may come while their target works on a certain request; those of the network towards its peer in that.
AIMED: frozenset[FaultKind] = frozenset(FAULTS) - {
    "index_lies", "router_dies", "redis_stalls", "redis_flushed", "redis_restarts", "redis_forgets", "clock_jumps",
}  # fmt: skip
PEER = "peer"  # the other end of an aimed fault: who has the request's other half
AIM_S = 15.0  # seconds for which an aimed fault waits for its request's phase at most
SLOW_SHARE, SLOW_STEP_S = 0.4, 0.1  # of runs with faults: answers go on for so long that faults meet them
ABRUPT = 100.0  # the factor of a fault of weights whose worker ends without draining
FLOODING = ("flood", "drop")  # tenants that are held against fair shares


class Shares(NamedTuple):
    """Cumulative shares of requests of each special kind: pooled up to the first, scored up to the second, and so
    on.
    """

    pooled: float
    scored: float
    constrained: float


USUAL, PRESSED = Shares(0.08, 0.18, 0.4), Shares(0.25, 0.5, 0.7)
ADAPTERS = ("one", "two", "three")  # one more than a worker holds
POLICIES = ("cost", "round_robin", "least_loaded")


class Request(msgspec.Struct, frozen=True):
    """A client's request, and how the client behaves. Times are in seconds."""

    number: int
    at: float  # after the start of the run
    prompt: tuple[int, ...]
    sampling: Sampling  # parameters of the answer
    n: int = 1  # choices
    router: int = 0  # index of the router that is asked
    tenant: str = ""  # "" for none
    cancels: tuple[float, ...] = ()  # times after asking at which the client cancels
    read_pause: float = 0.0  # between two reads of the stream
    deadline_after: float | None = None  # seconds after asking; None for no deadline
    adapter: str = ""  # the name of a LoRA adapter, "" for none
    over_http: str = ""  # "whole" or "stream": it is asked over HTTP, for text; "": at the dispatcher
    stops: tuple[str, ...] = ()  # stop strings, over HTTP alone


class Fault(msgspec.Struct, frozen=True):
    """Something that goes wrong at ``at`` seconds after the start of the run and lasts for ``seconds``.

    With an ``aim`` it waits until a worker begins that phase of request ``request``, for AIM_S at most, and
    ``after`` seconds more; that worker is the target then.
    """

    kind: FaultKind
    at: float
    target: str  # a worker or a router by name
    other: str = ""  # the other end of a network fault
    seconds: float = 0.0
    factor: float = 1.0  # how bad it is; its unit depends on ``kind``
    aim: Phase = ""
    request: int = -1
    after: float = 0.0

    @property
    def ends_at(self) -> float:
        """Returns the time, in seconds after the start of the run, at which the fault is over at the latest."""
        return self.at + self.seconds + (AIM_S + self.after if self.aim else 0.0)


class Batch(msgspec.Struct, frozen=True):
    """A batch job that comes at ``at`` seconds: a greedy completion of ``max_tokens`` tokens for each prompt."""

    at: float
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int


class AdapterChange(msgspec.Struct, frozen=True):
    """An operator's change of adapter ``name`` at ``at`` seconds: it is loaded anew from ``path``, or unloaded."""

    at: float
    name: str
    content: int | None  # the number of the files' content; None: unload it
    path: str
    router: int = 0  # index of the router that the operator asks
    pinned: bool = False  # whether every worker is to hold it


class Scenario(msgspec.Struct, frozen=True):
    """Everything about a run; ``seed`` decides the rest, such as delays and the order of ready tasks."""

    seed: int
    prefill: int  # workers
    decode: int  # workers
    routers: int
    pages: int  # KV pages of each worker
    policy: str  # one of POLICIES, by which routers place requests
    local_max: int  # prompt tokens that a decode worker prefills itself, at most
    chunk_tokens: int  # prompt tokens of a prefill step, at most
    max_batch: int  # sequences of a step, at most
    step_s: float  # seconds that a step takes at least
    token_s: float  # seconds that each token adds to a step
    hedge: float  # times its predicted duration after which a prefill is tried elsewhere; 0: never
    swap: bool  # whether preempted sequences' pages are copied to host memory
    lease_ttl_s: float  # seconds that a lease lasts without progress
    tier_pages: int  # pages of the host tier of each worker
    delay_s: float  # least network delay in one direction
    requests_per_min: int  # rate limit of each tenant; 0 for none
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    batches: tuple[Batch, ...] = ()
    controller: bool = False  # whether a controller changes workers' roles
    adapters: tuple[AdapterChange, ...] = ()  # by time

    @property
    def ends_at(self) -> float:
        """Returns the time, in seconds, at which the last request has come and the last fault is over."""
        times = [r.at for r in self.requests] + [f.ends_at for f in self.faults]
        times += [change.at for change in self.adapters]
        return max(times, default=0.0)

    @property
    def spares_requests(self) -> bool:
        """Returns whether all faults end workers, and are fewer than a request's attempts, so that no request need
        fail.
        """
        ending = [fault.kind in ENDING for fault in self.faults]
        return all(ending) and len(ending) < DispatchSettings().max_attempts

    @property
    def heard_s(self) -> float:
        """Returns the seconds within which every engine must have heard that a client has left."""
        hindering = [fault.seconds for fault in self.faults if fault.kind in HINDERING]
        return GONE_S + 4 * self.delay_s + (KEEPALIVE_S + max(hindering) if hindering else 0.0)


class Size(msgspec.Struct, frozen=True):
    """Upper bounds for a drawn scenario."""

    workers: int = 4  # of each role
    requests: int = 40
    faults: int = 6
    seconds: float = 20.0  # in which requests and faults come
    kinds: tuple[FaultKind, ...] = FAULTS  # faults to draw from
    adapted: float = 0.15  # share of scenarios with adapters
    http: float = 0.2  # share of scenarios with requests over HTTP
    aimed: float = 0.6  # share of faults that come soon after a request or while a worker is at it
    pressed: float = 0.15  # share of scenarios with so many requests on so few pages that sequences are preempted


def draw(seed: int, size: Size = Size()) -> Scenario:
    """Returns the scenario of ``seed``, within the bounds of ``size``."""
    rng = random.Random(f"scenario {seed}")
    prefill, decode = rng.randint(1, size.workers), rng.randint(1, size.workers)
    routers = rng.choice((1, 1, 1, 2))
    span = rng.uniform(0.2, 1.0) * size.seconds
    pressed = rng.random() < size.pressed
    if pressed:
        decode, span = 1, min(span, 2.0)
    workers = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
    names = workers + [f"router-{i}" for i in range(routers)]
    heads = [_tokens(rng, rng.randint(16, 200)) for _ in range(4)]
    requests = [
        _request(rng, i, span, heads, routers, PRESSED if pressed else USUAL)
        for i in range(rng.randint(size.requests // 2 if pressed else 1, size.requests))
    ]
    flooded = rng.random() < 0.1
    requests += _flood(rng, len(requests), span) if flooded else ()
    kinds = _kinds(rng, size)
    faults = [_fault(rng, kinds, span, workers, names) for _ in range(rng.randint(1, size.faults) if kinds else 0)]
    # What is fair is told without faults.
    faults = [] if flooded else _aimed(seed, [*faults, *_rolling(seed, kinds, span, workers)], requests, size.aimed)
    drawn = Scenario(
        seed=seed,
        prefill=prefill,
        decode=decode,
        routers=routers,
        pages=40 if pressed else rng.choice((40, 40, 64, 120, 300)),
        policy=rng.choice(POLICIES),
        local_max=rng.choice((0, 16, 64)),
        chunk_tokens=rng.choice((24, 64, 250)),
        max_batch=16 if pressed else rng.choice((2, 4, 16)),
        step_s=rng.choice((0.001, 0.005, 0.02)),
        token_s=rng.choice((0.00001, 0.0001)),
        hedge=rng.choice((0.0, 1.5, 3.0)),
        swap=rng.random() < 0.5,
        lease_ttl_s=rng.choice((2.0, 8.0, 30.0)),
        tier_pages=rng.choice((0, 0, 30, 200)),
        delay_s=rng.choice((0.0003, 0.0003, 0.005, 0.03)),
        requests_per_min=rng.choice((0, 0, 6)),
        requests=tuple(sorted(requests, key=lambda r: r.at)),
        faults=tuple(sorted(faults, key=lambda f: f.at)),
        batches=tuple(_batch(rng, span) for _ in range(rng.choice((0, 0, 1, 2)))),
        controller=rng.random() < 0.25,
    )
    if faults and random.Random(f"pace {seed}").random() < SLOW_SHARE:
        drawn = msgspec.structs.replace(drawn, step_s=SLOW_STEP_S)
    return drawn if flooded else _over_http(_with_adapters(drawn, span, size.adapted), size.http)


def _kinds(rng: random.Random, size: Size) -> list[FaultKind]:
    """Draws the kinds of faults of a run; an eighth of the runs have none."""
    if not size.kinds or not size.faults or rng.random() < 0.125:
        return []
    return rng.sample(size.kinds, rng.randint(1, len(size.kinds)))


def _over_http(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with requests that are asked over HTTP; embeddings never are."""
    rng = random.Random(f"http {scenario.seed}")
    if rng.random() >= share:
        return scenario
    asked = (r if r.sampling.pooling or rng.random() < 0.3 else _for_text(rng, r) for r in scenario.requests)
    return msgspec.structs.replace(scenario, requests=tuple(asked))


def _for_text(rng: random.Random, request: Request) -> Request:
    """Most of the simulated engine's tokens read as a number in angle brackets, so a stop string may span two."""
    stops = tuple(rng.choice(("<{0}", "{0}>", "{0}><", "><{0}")).format(rng.randrange(10)) for _ in range(2))
    own = request.sampling
    how = rng.choice(("whole", "stream")) if own.prompt_logprobs is None else "whole"
    return msgspec.structs.replace(
        request,
        over_http=how,
        stops=stops if rng.random() < 0.5 and not own.min_tokens else (),
        sampling=msgspec.structs.replace(own, min_tokens=min(own.min_tokens, own.max_tokens)),
        cancels=request.cancels[:1],
    )


def _aimed(seed: int, faults: list[Fault], requests: list[Request], share: float) -> list[Fault]:
    """Returns ``faults`` with ``share`` of them aimed at requests, because most workers are idle at most times."""
    rng = random.Random(f"aimed {seed}")
    return [_at(rng, fault, _worth_it(rng, requests)) if rng.random() < share else fault for fault in faults]


def _worth_it(rng: random.Random, requests: list[Request]) -> Request:
    """Draws three requests and returns the one that goes on longest, if it isn't left, with a grammar before
    without.
    """
    drawn = [rng.choice(requests) for _ in range(3)]
    return max(drawn, key=lambda r: (not r.cancels, r.sampling.grammar is not None, r.sampling.max_tokens))


def _at(rng: random.Random, fault: Fault, request: Request) -> Fault:
    """Returns ``fault`` in a phase of ``request``, or soon after it is sent if no worker is the fault's target."""
    if fault.kind not in AIMED:
        return msgspec.structs.replace(fault, at=request.at + rng.uniform(0.0, 0.4))
    after = rng.choice((0.0, rng.uniform(0.0, 0.02), rng.uniform(0.0, 1.0)))
    brief = fault.kind in ("role", "ratio") and rng.random() < 0.5  # no time for what is open to end
    moved = fault.kind in (*ENDING, "weights") and rng.random() < 0.5  # an answer goes on elsewhere
    return msgspec.structs.replace(
        fault,
        at=request.at,
        aim="writing" if moved else rng.choice(PHASES),
        request=request.number,
        after=after,
        other=PEER if rng.random() < 0.5 else fault.other,
        seconds=rng.uniform(0.0, 0.1) if brief else fault.seconds,
    )


def _rolling(seed: int, kinds: list[FaultKind], span: float, workers: list[str]) -> Iterator[Fault]:
    """Draws the faults of a rolling upgrade, in a third of the runs that change weights: one worker after another,
    of which some are killed.
    """
    rng = random.Random(f"rolling {seed}")
    if "weights" not in kinds or rng.random() >= 0.33:
        return
    for at, worker in zip(sorted(rng.uniform(0.0, span) for _ in workers), workers, strict=True):
        if rng.random() < 0.7:
            yield Fault("weights", at, worker, factor=rng.choice((1.0, ABRUPT)))


def _with_adapters(scenario: Scenario, span: float, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with adapters that come, change and go, and requests on them."""
    rng = random.Random(f"adapters {scenario.seed}")
    if rng.random() >= share:
        return scenario
    changes = [change for name in ADAPTERS for change in _changes(rng, name, span, scenario.routers)]
    requests = [
        msgspec.structs.replace(r, adapter=rng.choice(ADAPTERS) if rng.random() < 0.7 else "")
        for r in scenario.requests
    ]
    by_time = tuple(sorted(changes, key=lambda change: change.at))
    return msgspec.structs.replace(scenario, requests=tuple(requests), adapters=by_time)


def _changes(rng: random.Random, name: str, span: float, routers: int) -> Iterator[AdapterChange]:
    """Draws the changes of one adapter: loaded early, then replaced or unloaded, at the same path or at another."""
    pinned = rng.random() < 0.3
    times = sorted(rng.uniform(0.0, span) for _ in range(rng.choice((0, 0, 1, 2, 3))))
    for number, at in enumerate([0.0, *times]):
        content = None if number and rng.random() < 0.3 else rng.randrange(3)
        path = f"{name}/{rng.choice((0, number))}"
        yield AdapterChange(at, name, content, path, rng.randrange(routers), pinned)


def _request(
    rng: random.Random, number: int, span: float, heads: list[tuple[int, ...]], routers: int, shares: Shares
) -> Request:
    shared = rng.choice(heads)[: rng.choice((16, 64, 200))] if rng.random() < 0.6 else ()
    prompt = (*shared, *_tokens(rng, rng.randint(1, rng.choice((8, 60, 400)))))
    sampled, special = rng.random() < 0.5, rng.random()
    pooling = rng.choice(("mean", "last")) if special < shares.pooled else ""
    sampling = Sampling(
        temperature=rng.choice((0.5, 1.0)) if sampled else 0.0,
        seed=rng.getrandbits(63),
        max_tokens=1 if pooling else rng.randint(1, rng.choice((4, 30, 120))),
        min_tokens=rng.choice((0, 0, 2)),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice((0, 0, 20)))),
        logprobs=rng.choice((None, None, 2)),
        prompt_logprobs=rng.choice((0, 2)) if shares.pooled <= special < shares.scored else None,
        grammar=Grammar("regex", f"{rng.random()}") if shares.scored <= special < shares.constrained else None,
        pooling=pooling,
    )
    cancels, deadline = _cancels(rng), rng.uniform(0.02, rng.choice((0.5, 20.0))) if rng.random() < 0.1 else None
    if (cancels or deadline) and not pooling and rng.random() < 0.4:
        long = {"max_tokens": rng.randint(200, 1200), "ignore_eos": True, "stop_token_ids": ()}
        sampling = msgspec.structs.replace(sampling, **long)  # so that there is something to go on with for nobody
    return Request(
        number=number,
        at=rng.uniform(0.0, span),
        prompt=prompt,
        sampling=sampling,
        n=1 if pooling else rng.choice((1, 1, 1, 2, 4)),
        router=rng.randrange(routers),
        tenant=rng.choice(("", "", "a", "b")),
        cancels=cancels,
        read_pause=rng.choice((0.0, 0.0, 0.0, 0.2)),
        deadline_after=deadline,
    )


def _flood(rng: random.Random, first: int, span: float) -> Iterator[Request]:
    """Draws the requests of a tenant that sends many at once, and of one that sends fewer at the same time."""
    at, length, most = rng.uniform(0.0, span), rng.choice((40, 200)), rng.choice((10, 40))
    sampling = Sampling(temperature=0.0, max_tokens=most, ignore_eos=True)
    for number in range(60):
        tenant = FLOODING[number % 3 == 2]
        cancels = (rng.uniform(0.0, 1.0),) if rng.random() < 0.2 else ()
        yield Request(
            first + number, at + 0.001 * number, _tokens(rng, length), sampling, tenant=tenant, cancels=cancels
        )


def _batch(rng: random.Random, span: float) -> Batch:
    prompts = tuple(_tokens(rng, rng.randint(1, 40)) for _ in range(rng.randint(1, 30)))
    return Batch(rng.uniform(0.0, span), prompts, rng.randint(1, 60))


def _cancels(rng: random.Random) -> tuple[float, ...]:
    """Draws the times at which a client cancels: none for three quarters of clients, two for some."""
    if rng.random() >= 0.25:
        return ()
    first = rng.uniform(0.0, rng.choice((0.05, 1.0, 5.0)))
    return (first, first + rng.uniform(0.0, 0.01)) if rng.random() < 0.3 else (first,)


def _fault(rng: random.Random, kinds: list[FaultKind], span: float, workers: list[str], names: list[str]) -> Fault:
    kind = rng.choice(kinds)
    target, other = (
        rng.choice(names[len(workers) :] if kind == "router_dies" else workers),
        rng.choice([*names, "redis"]),
    )
    seconds = rng.uniform(0.05, rng.choice((1.0, 4.0, 20.0)))
    return Fault(kind, rng.uniform(0.0, span), target, other, seconds, rng.choice((10.0, 100.0)))


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))
