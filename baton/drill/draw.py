"""Draws a scenario from its seed: the cluster, its requests and its faults."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from baton.drill.language.oracle import VOCABULARY
from baton.drill.machines.network import KEEPALIVE_S
from baton.drill.operated.turns import with_held, with_kept_roles, with_turns
from baton.drill.operated.wishes import (
    with_cancelled_jobs,
    with_drains,
    with_keys,
    with_pins,
    with_scales,
)
from baton.drill.overload import overloaded, with_few_bytes, with_few_places, with_priorities
from baton.drill.scenario import (
    ABRUPT,
    AIMED,
    APART,
    ENDING,
    FLOODING,
    HOSTED,
    OPERATED,
    PEER,
    PHASES,
    POLICIES,
    REDIS,
    SLOW_STEP_S,
    Batch,
    Fault,
    FaultKind,
    Request,
    Scenario,
    Size,
)
from baton.drill.sessions import with_sessions
from baton.drill.specials import (
    specials_of,
    tokens_of,
    with_adapters,
    with_disk,
    with_drafts,
    with_floats,
    with_hosts,
    with_http,
    with_lent_cores,
    with_pages,
    with_selection,
    with_steps_ahead,
)
from baton.drill.surfaces import with_chats, with_rankings, with_surfaces, with_tensors
from baton.protos.nouns import Grammar, Sampling

SLOW_SHARE = 0.4  # of runs with faults: steps take SLOW_STEP_S
IN_DRAINS = 0.3  # share of workers that are told to stop whose engines die meanwhile


class Shares(NamedTuple):
    """Cumulative shares of requests of each special kind: pooled up to the first, scored up to the second, and so
    on.
    """

    pooled: float
    scored: float
    constrained: float


USUAL, PRESSED = Shares(0.08, 0.18, 0.4), Shares(0.25, 0.5, 0.7)


def draw(seed: int, size: Size = Size()) -> Scenario:
    """Returns the scenario of ``seed``, within the bounds of ``size``."""
    rng = random.Random(f"scenario {seed}")
    prefill, decode = rng.randint(1, size.workers), rng.randint(1, size.workers)
    routers = rng.choice((1, 1, 1, 2))
    span = rng.uniform(0.2, 1.0) * size.seconds
    pressed, specials = rng.random() < size.pressed, specials_of(seed, size)
    if pressed:
        decode, span = 1, min(span, 2.0)
    workers = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
    names = workers + [f"router-{i}" for i in range(routers)]
    heads = [tokens_of(rng, rng.randint(16, 200)) for _ in range(4)]
    requests = [
        _request(rng, i, span, heads, routers, PRESSED if pressed else USUAL)
        for i in range(rng.randint(size.requests // 2 if pressed or specials else 1, size.requests))
    ]
    flooded = rng.random() < size.flooded
    requests += _flood(rng, len(requests), span) if flooded else ()
    kinds = _kinds(rng, size)
    faults = [_fault(rng, kinds, span, workers, names) for _ in range(rng.randint(1, size.faults) if kinds else 0)]
    # What is fair is told without faults.
    faults += [*_rolling(seed, kinds, span, workers), *_apart(seed, size, bool(faults), span, workers, names)]
    faults = [] if flooded else _aimed(seed, faults, requests, size.aimed)
    faults = _ending(seed, faults, requests, size.ending)
    faults += _in_drains(seed, size, faults)
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
    if random.Random(f"tenants {seed}").random() < size.overloaded:
        return overloaded(drawn)
    if flooded:
        return drawn
    for special in specials:
        drawn = special(drawn, span)
    drawn = with_chats(with_http(with_adapters(drawn, span, size.adapted), size.http), size.chats)
    drawn = with_rankings(with_tensors(with_surfaces(drawn, size.surfaces), size.tensors), size.ranked)
    drawn = with_pages(with_drafts(with_disk(drawn, size.disked), size.drafted), size.paged)
    drawn = with_cancelled_jobs(drawn, size.cancelled_jobs)
    drawn = with_keys(with_scales(with_pins(drawn, span, size.pinned), span, size.scaled), span, size.keyed)
    drawn = with_selection(with_floats(drawn, size.floats), size.selected)
    drawn = with_steps_ahead(with_hosts(drawn, span, size.kinds, size.hosted), size.ahead)
    drawn = with_sessions(with_lent_cores(drawn, size.lent), span, size.conversing)
    drawn = with_held(with_turns(drawn, span, size.kinds, size.turned), span, size.kinds, size.held)
    drawn = with_drains(drawn, span, size.kinds, size.drained)
    drawn = with_kept_roles(with_few_bytes(with_few_places(drawn, size.narrow), size.tight), size.kept_roles)
    return with_priorities(drawn, size.ordered)


def _kinds(rng: random.Random, size: Size) -> list[FaultKind]:
    """Draws the kinds of faults of a run; an eighth of the runs have none."""
    kinds = [kind for kind in size.kinds if kind not in (*APART, *HOSTED, *OPERATED)]
    if not kinds or not size.faults or rng.random() < 0.125:
        return []
    return rng.sample(kinds, rng.randint(1, len(kinds)))


def _aimed(seed: int, faults: list[Fault], requests: list[Request], share: float) -> list[Fault]:
    """Returns ``faults`` with ``share`` of them aimed at requests, because most workers are idle at most times."""
    rng = random.Random(f"aimed {seed}")
    return [_at(rng, fault, _worth_it(rng, requests)) if rng.random() < share else fault for fault in faults]


def _ending(seed: int, faults: list[Fault], requests: list[Request], share: float) -> list[Fault]:
    """Returns ``faults``, with ``share`` of the aimed ones as the last token of an answer is written: what the
    worker would say of the end may be lost then. Most are at answers that end by a grammar, whose word may be late.
    """
    rng = random.Random(f"ending {seed}")
    bound = [r for r in requests if r.sampling.grammar is not None and not r.cancels]

    def at_the_end(fault: Fault) -> Fault:
        after = rng.uniform(0.0, rng.choice((0.02, 0.1)))
        if not bound or rng.random() < 0.3:
            return msgspec.structs.replace(fault, aim="ending", after=after)
        one = rng.choice(bound)
        return msgspec.structs.replace(fault, aim="ending", after=after, at=one.at, request=one.number)

    return [at_the_end(fault) if fault.aim and rng.random() < share else fault for fault in faults]


def _in_drains(seed: int, size: Size, faults: list[Fault]) -> list[Fault]:
    """Draws the deaths of engines whose workers drain: of a share of those that ``faults`` tell to stop."""
    rng = random.Random(f"in drains {seed}")
    found = list[Fault]()
    for fault in faults if "engine_dies" in size.kinds else ():
        if fault.kind == "leave" and rng.random() < IN_DRAINS:
            later = rng.uniform(0.0, 1.5)
            at = {"after": fault.after + later} if fault.aim else {"at": fault.at + later}
            found.append(msgspec.structs.replace(fault, kind="engine_dies", **at))
    return found


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


def _apart(
    seed: int, size: Size, faulty: bool, span: float, workers: list[str], names: list[str]
) -> Iterator[Fault]:
    """Draws faults of APART: in a share of the scenarios with faults; in all if no other is asked for."""
    rng = random.Random(f"apart {seed}")
    kinds = [kind for kind in size.kinds if kind in APART]
    alone = set(size.kinds) <= {*APART, *HOSTED, *OPERATED}
    if not kinds or not size.faults or not (alone or (faulty and rng.random() < size.apart)):
        return
    for _ in range(rng.randint(1, max(1, size.faults // 2))):
        kind = rng.choice(kinds)
        target = rng.choice(workers if kind == "roster_lies" else names)
        seconds = KEEPALIVE_S if kind == "half_open" else rng.uniform(0.5, 10.0)
        other, factor = rng.choice([*names, REDIS]), rng.choice((-100.0, 10.0, 100.0))
        yield Fault(kind, rng.uniform(0.0, span), target, other, seconds, factor)


def _request(
    rng: random.Random, number: int, span: float, heads: list[tuple[int, ...]], routers: int, shares: Shares
) -> Request:
    shared = rng.choice(heads)[: rng.choice((16, 64, 200))] if rng.random() < 0.6 else ()
    prompt = (*shared, *tokens_of(rng, rng.randint(1, rng.choice((8, 60, 400)))))
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
    ahead = rng.random() < 0.5  # whether all of the flood comes before the other tenant's requests
    for number in range(60):
        floods = number < 40 if ahead else number % 3 < 2
        cancels = (rng.uniform(0.0, 1.0),) if rng.random() < 0.2 else ()
        yield Request(
            number=first + number,
            at=at + 0.001 * number,
            prompt=tokens_of(rng, length),
            sampling=sampling,
            tenant=FLOODING[not floods],
            cancels=cancels,
        )


def _batch(rng: random.Random, span: float) -> Batch:
    prompts = tuple(tokens_of(rng, rng.randint(1, 40)) for _ in range(rng.randint(1, 30)))
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
        rng.choice([*names, REDIS]),
    )
    seconds = rng.uniform(0.05, rng.choice((1.0, 4.0, 20.0)))
    return Fault(kind, rng.uniform(0.0, span), target, other, seconds, rng.choice((10.0, 100.0)))
