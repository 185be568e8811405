"""Makes a drawn scenario one in which more is asked than there is room for: queues of few places, few bytes for
requests, priorities, and tenants with weights who contend for places.

Knows nothing of what is usual. Each draws from randomness of its own, so that the rest of a scenario stays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from baton.drill.scenario import FLOODING, ClientKey, Request, Scenario, Tenant
from baton.drill.specials import tokens_of
from baton.protos.nouns import Sampling
from baton.router.dispatch.fair_queue import work_of
from baton.router.dispatch.ticket import BYTES_PER_TOKEN

ASKED = 130  # requests of the tenants who contend
SHORT, SHORT_TOKENS, LONG = 40, 64, 90  # prompt tokens: of a short one, of its class at most, of a long one
KEPT = 8  # requests of the drawn scenario that stay, at most
LEAST_BYTES = 20_000  # that requests may hold at least: more than the one that is asked at rest
JOBS = 0.5  # share of these runs that keep the batch jobs of the drawn scenario
URGENT = 0.5  # share of these runs without keys in which some requests are more urgent than others
RARE = 0.08  # share of the contending requests that the tenant who asks at times sends
ELSEWHERE = 0.08  # share of the contending requests that another queue takes, of another model or class
BOTH = 0.4  # the same where one of the models is slow


def with_few_places(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of those with faults with queues of a few places."""
    rng = random.Random(f"few places {scenario.seed}")
    if rng.random() >= share or not scenario.faults:
        return scenario
    return msgspec.structs.replace(scenario, max_queue=rng.choice((1, 2, 4, 8, 16)))


def with_few_bytes(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of those with faults and without HTTP with room for a part of the bytes of
    its requests, and at least for the largest of them.
    """
    rng = random.Random(f"few bytes {scenario.seed}")
    if rng.random() >= share or not scenario.faults or any(r.over_http for r in scenario.requests):
        return scenario
    sizes = [bytes_of(request) for request in scenario.requests]
    most = max([*sizes, LEAST_BYTES, int(sum(sizes) * rng.uniform(0.02, 0.3))])
    return msgspec.structs.replace(scenario, max_inflight_bytes=most)


def bytes_of(request: Request) -> int:
    """Returns the bytes that a router counts for ``request``."""
    return BYTES_PER_TOKEN * work_of(len(request.prompt), request.sampling.max_tokens, request.n)


def with_priorities(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of all with priorities of the requests whose API has some. With an API key
    nobody can ask to be more urgent than the key is.
    """
    rng = random.Random(f"priorities {scenario.seed}")
    if rng.random() >= share:
        return scenario

    def ordered(request: Request) -> Request:
        priority = rng.choice((-2, -1, 0, 0, 1, 3))
        foreign = request.anthropic or request.responses or request.over_grpc or request.tensors
        if foreign or request.ranking is not None:
            return request
        least = 0 if request.over_http and scenario.keys else priority
        return msgspec.structs.replace(request, priority=max(least, priority))

    return msgspec.structs.replace(scenario, requests=tuple(map(ordered, scenario.requests)))


def overloaded(scenario: Scenario) -> Scenario:
    """Returns ``scenario`` without faults, with tenants who ask for 1.5 to 4 times as much as there is room for.

    In half of them their calls go over HTTP and gRPC, with API keys, which have rates in some.
    """
    rng = random.Random(f"overload {scenario.seed}")
    jobs = scenario.batches if random.Random(f"jobs {scenario.seed}").random() < JOBS else ()
    models, short_tokens, batch = rng.choice((1, 2)), rng.choice((0, SHORT_TOKENS)), rng.choice((2, 4))
    step_s, answer = rng.choice((0.002, 0.005)), rng.choice((8, 16))
    tenants = tuple(Tenant(name, rng.choice((1.0, 1.0, 2.0, 4.0))) for name in FLOODING)
    wired = rng.random() < 0.5
    kept = [_elsewhere(rng, request, models) for request in scenario.requests[:KEPT]]
    paces = _paces(scenario.seed) if models > 1 else ()
    gap_s = step_s * answer / batch / rng.uniform(1.5, 4.0)
    asked = list(
        _contending(rng, scenario, gap_s, answer, models, bool(short_tokens), BOTH if paces else ELSEWHERE)
    )
    if wired:
        asked = [_wired(rng, request) for request in asked]
    elif (own := random.Random(f"urgent {scenario.seed}")).random() < URGENT:
        asked = [msgspec.structs.replace(r, priority=own.choice((-1, 0, 0, 0, 2)), slo_ttft_s=0.0) for r in asked]
    return msgspec.structs.replace(
        scenario,
        prefill=models, decode=models, routers=1, pages=300, max_batch=batch, step_s=step_s, token_s=0.00001,
        delay_s=0.0003, hedge=0.0, local_max=rng.choice((0, SHORT_TOKENS)), controller=False, faults=(),
        batches=jobs, models=models, paces=paces, short_tokens=short_tokens, tenants=tenants,
        max_queue=rng.choice((3, 6, 12, 24, 32)),
        requests_per_min=rng.choice((0, 0, 40, 80)), requests=tuple(sorted([*kept, *asked], key=lambda r: r.at)),
        keys=tuple(ClientKey(tenant.name, weight=tenant.weight) for tenant in tenants) if wired else (),
    )  # fmt: skip


def _paces(seed: int) -> tuple[float, ...]:
    """Draws the paces of two models, of which one is a few times as slow in half of the runs."""
    rng = random.Random(f"paces {seed}")
    return rng.choice(((), (1.0, rng.uniform(3.0, 10.0)), (rng.uniform(2.0, 5.0), 1.0), ()))


def _elsewhere(rng: random.Random, request: Request, models: int) -> Request:
    """Returns a request of the drawn scenario for any of the models, which no cancel or pause makes last."""
    return msgspec.structs.replace(request, model=rng.randrange(models), router=0, read_pause=0.0)


def _contending(
    rng: random.Random, scenario: Scenario, gap_s: float, answer: int, models: int, classes: bool, elsewhere: float
) -> Iterator[Request]:
    """Draws the requests of the tenants: one floods, one asks for its share or more, and one asks at times.

    The share ``elsewhere`` is for another model, or of another class; if it is small, that queue isn't full.
    """
    first = max(request.number for request in scenario.requests) + 1
    at, flooding, hurried = rng.uniform(0.0, 1.0), rng.choice((0.5, 0.67, 0.85)), rng.random() < 0.3
    for number in range(ASKED):
        rare, other = rng.random() < RARE, rng.random() < elsewhere
        tenant = FLOODING[2] if rare else FLOODING[rng.random() >= flooding]
        length = LONG if other and classes and (models == 1 or rng.random() < 0.5) else SHORT
        limit = rng.random()
        yield Request(
            number=first + number,
            at=at + gap_s * number,
            prompt=tokens_of(rng, length),
            sampling=Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True),
            tenant=tenant,
            model=1 if other and length == SHORT and models > 1 else 0,
            cancels=(rng.uniform(0.0, 0.5),) if limit < 0.08 else (),
            deadline_after=rng.uniform(0.05, 1.0) if limit > 0.93 else None,
            slo_ttft_s=rng.choice((0.1, 0.4, 0.4) if rare else (0.0, 0.0, 0.1, 0.4)) if hurried else 0.0,
        )


def _wired(rng: random.Random, request: Request) -> Request:
    """Returns ``request`` over HTTP or gRPC, with its tenant's key."""
    how, key = rng.choice(("whole", "stream")), FLOODING.index(request.tenant)
    asked = msgspec.structs.replace(request, over_http=how, key=key)
    return msgspec.structs.replace(asked, over_grpc=rng.random() < 0.3)
