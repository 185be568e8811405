"""Makes a drawn scenario special: sequences that are preempted, prompts in tiers, leases that nearly run out, batch
jobs that routers lose, text over HTTP, adapters.

Knows nothing of what is usual. Each draws from randomness of its own, so that the rest of a scenario stays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import msgspec

from baton.drill.language.oracle import VOCABULARY, Sight
from baton.drill.machines.network import KEEPALIVE_S
from baton.drill.scenario import (
    FAR,
    PEER,
    PHASES,
    REDIS,
    SLOW_STEP_S,
    AdapterChange,
    Batch,
    Fault,
    FaultKind,
    PageKind,
    Request,
    Scenario,
    Size,
)
from baton.protos.nouns import Sampling

Special = Callable[[Scenario, float], Scenario]  # makes a scenario, which lasts for so many seconds, special
FED = ("reading", "receiving")  # phases in which a prompt is on its way
LOADED_S = 5.0  # seconds after which the first adapters are loaded, if nothing goes wrong
DTYPES, CODECS = ("float32", "bfloat16", "float16"), ("none", "int8", "fp8", "int4")
ADAPTERS = ("one", "two", "three")  # one more than a worker holds


def specials_of(seed: int, size: Size) -> list[Special]:
    """Draws which special scenarios that of ``seed`` is; most are none."""
    rng = random.Random(f"special {seed}")
    split = size.split if {"cut", "router_dies"} <= set(size.kinds) else 0.0
    shares = (_crowded, size.crowded), (_tiered, size.tiered), (_hasty, size.hasty), (_split, split)
    return [special for special, share in shares if rng.random() < share]


def _crowded(scenario: Scenario, span: float) -> Scenario:
    """Returns ``scenario`` with many short sequences on the pages of few, some of which their clients leave."""
    rng = random.Random(f"crowd {scenario.seed}")
    requests = (_short(rng, request, min(span, 1.0)) for request in scenario.requests)
    few = {"decode": 1, "pages": 40, "max_batch": 16, "local_max": 64, "swap": True, "step_s": 0.02}
    kept = [f for f in scenario.faults if not f.target.startswith("decode") or f.target == "decode-0"]
    return msgspec.structs.replace(scenario, requests=tuple(requests), faults=tuple(kept), **few)


def _short(rng: random.Random, request: Request, span: float) -> Request:
    """Returns ``request`` early, with a short prompt and an answer of some pages; a third of clients leave it."""
    own, end = request.sampling, rng.randint(10, 60)
    long = own if own.pooling else msgspec.structs.replace(own, max_tokens=rng.randint(40, 100), ignore_eos=True)
    cancels = (rng.uniform(0.3, 3.0),) if rng.random() < 0.3 else ()
    at = rng.uniform(0.0, span)
    return msgspec.structs.replace(request, at=at, prompt=request.prompt[:end], sampling=long, cancels=cancels)


def _tiered(scenario: Scenario, span: float) -> Scenario:
    """Returns ``scenario`` with few long prompts, each asked many times, which tiers hold and the pages don't."""
    rng = random.Random(f"prompts {scenario.seed}")
    prompts = [tokens_of(rng, rng.randint(400, 560)) for _ in range(6)]
    requests = (msgspec.structs.replace(r, prompt=rng.choice(prompts), tenant="") for r in scenario.requests)
    return msgspec.structs.replace(scenario, requests=tuple(requests), pages=80, tier_pages=200)


def _hasty(scenario: Scenario, span: float) -> Scenario:
    """Returns ``scenario`` with prompts whose handoffs go on for longer than leases last without progress."""
    rng = random.Random(f"long {scenario.seed}")
    requests = (
        msgspec.structs.replace(r, prompt=(*r.prompt[:100], *tokens_of(rng, rng.randint(150, 300))))
        for r in scenario.requests
    )
    faults = (
        msgspec.structs.replace(f, aim="receiving", after=rng.uniform(0.0, 5.0)) if f.aim in FED else f
        for f in scenario.faults
    )
    paced = {"step_s": SLOW_STEP_S, "chunk_tokens": 24, "lease_ttl_s": 2.0, "local_max": 0}
    return msgspec.structs.replace(scenario, requests=tuple(requests), faults=tuple(faults), **paced)


def _split(scenario: Scenario, span: float) -> Scenario:
    """Returns ``scenario`` with two routers, which die or are cut from Redis during a long batch job."""
    rng = random.Random(f"apart {scenario.seed}")
    batch = Batch(rng.uniform(0.0, 1.0), tuple(tokens_of(rng, rng.randint(1, 40)) for _ in range(30)), 60)
    faults = [_of_router(rng, batch.at + rng.uniform(0.5, 6.0)) for _ in range(rng.randint(1, 3))]
    faults = sorted((*scenario.faults, *faults), key=lambda fault: fault.at)
    return msgspec.structs.replace(scenario, routers=2, batches=(batch,), step_s=0.02, faults=tuple(faults))


def _of_router(rng: random.Random, at: float) -> Fault:
    router = f"router-{rng.randrange(2)}"
    if rng.random() < 0.5:
        return Fault("router_dies", at, router)
    return Fault("cut", at, router, REDIS, rng.uniform(8.0, 25.0))


def with_http(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with requests that are asked over HTTP, embeddings among them."""
    rng = random.Random(f"http {scenario.seed}")
    if rng.random() >= share:
        return scenario
    asked = (
        _for_vector(r) if r.sampling.pooling else r if rng.random() < 0.3 else _for_text(rng, r)
        for r in scenario.requests
    )
    return msgspec.structs.replace(scenario, requests=tuple(asked))


def _for_vector(request: Request) -> Request:
    """Returns the request for an embedding over HTTP, which chooses nothing but the pooling."""
    sampling = Sampling(temperature=0.0, seed=request.sampling.seed, max_tokens=1, pooling=request.sampling.pooling)
    return msgspec.structs.replace(request, over_http="whole", sampling=sampling, cancels=request.cancels[:1])


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


def with_adapters(scenario: Scenario, span: float, share: float) -> Scenario:
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


def with_disk(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with disk tiers, which workers find again after they ended."""
    rng = random.Random(f"disk {scenario.seed}")
    if rng.random() >= share:
        return scenario
    return msgspec.structs.replace(scenario, disk_pages=rng.choice((20, 60, 200)))


def with_drafts(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with decode workers that speculate, more or less well."""
    rng = random.Random(f"drafts {scenario.seed}")
    if rng.random() >= share:
        return scenario
    requests = tuple(_bounded(rng, request) for request in scenario.requests)
    return msgspec.structs.replace(scenario, drafts_right=rng.choice((0.4, 0.8, 0.95)), requests=requests)


def with_steps_ahead(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of those without drafts with decode workers that plan steps ahead, if the
    model needs one page table and sees all of it.
    """
    rng, sight = random.Random(f"ahead {scenario.seed}"), scenario.sight
    tables = sight.window and not sight.every
    plain = not (tables or sight.state or sight.selected or sight.divided or scenario.drafts_right)
    if rng.random() >= share or not plain:
        return scenario
    return msgspec.structs.replace(scenario, steps_ahead=True)


def with_lent_cores(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of those that plan no steps ahead with engines on few machines, which lend
    one another cores. Steps of answers are held back while prompts are read beside them.
    """
    rng = random.Random(f"cores {scenario.seed}")
    if rng.random() >= share or scenario.steps_ahead:
        return scenario
    machines = rng.choice((1, max(1, min(scenario.prefill, scenario.decode))))
    return msgspec.structs.replace(scenario, machines=machines, pace_s=rng.choice((0.02, 0.05, 0.15)))


def _bounded(rng: random.Random, request: Request) -> Request:
    """Returns ``request``, in two of five cases with a bound on the drafts of a step, if its client can ask so."""
    most = rng.choice((None, None, None, 0, 2))
    if most is None or request.sampling.pooling or request.anthropic or request.ranking is not None:
        return request
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_drafts=most))


def with_pages(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with layers that see a window, with pages of their own at some
    workers, or with pages of several lengths.
    """
    rng = random.Random(f"pages {scenario.seed}")
    if rng.random() >= share:
        return scenario
    window = rng.choice((20, 50, 130))
    sight = rng.choice((Sight(), Sight(window), Sight(window), Sight(window, every=True), Sight(state=True)))
    if sight.state:  # which can't be rolled back
        kinds: tuple[PageKind, ...] = (PageKind(block_tokens=rng.choice((16, 16, 32))),)
        scenario = msgspec.structs.replace(scenario, drafts_right=0.0)
    elif sight.window and not sight.every:
        kinds = tuple(rng.sample((PageKind(), PageKind(own=True)), rng.choice((1, 2, 2, 2))))
    else:
        kinds = tuple(PageKind(block_tokens=size) for size in rng.sample((16, 16, 32, 64), rng.choice((1, 2, 2))))
    return msgspec.structs.replace(scenario, sight=sight, page_kinds=kinds)


def with_floats(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with KV of floats, which decode workers keep in several dtypes and
    take in by several codecs. Prefill workers keep what can be made into all of them, so roles don't change.
    """
    rng = random.Random(f"floats {scenario.seed}")
    if rng.random() >= share or scenario.placed or scenario.page_kinds:
        return scenario
    first = PageKind(dtype="float32", block_tokens=rng.choice((16, 16, 32)))
    kinds = [
        PageKind(False, rng.choice((16, 16, 32)), rng.choice(DTYPES), rng.choice(CODECS))
        for _ in range(rng.choice((1, 2, 3)))
    ]
    faults = tuple(fault for fault in scenario.faults if fault.kind not in ("role", "ratio"))
    return msgspec.structs.replace(scenario, page_kinds=(first, *kinds), faults=faults, controller=False)


def with_selection(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with a model that sees a part of a long context."""
    rng = random.Random(f"selection {scenario.seed}")
    if rng.random() >= share or scenario.page_kinds:
        return scenario
    window = rng.choice((16, 32, 64))
    selected = rng.choice((f"sinks:{rng.choice((0, 16, 48))}", f"snapkv:{window + rng.choice((16, 32, 96))}"))
    return msgspec.structs.replace(scenario, sight=Sight(selected=f"{selected},window:{window}"))


def with_hosts(scenario: Scenario, span: float, kinds: Sequence[FaultKind], share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with workers whose ranks are on one host or on two. Some of the
    others die, or are cut from their lead or from a worker that they send to, most as they are at a request. Faults
    are of ``kinds``.
    """
    rng = random.Random(f"hosts {scenario.seed}")
    if rng.random() >= share or scenario.page_kinds or scenario.sight != Sight():
        return scenario
    counts = rng.choice(((2,), (2,), (1, 2), (2, 1), (1, 2, 2)))
    wanted: list[FaultKind] = [kind for kind in ("host_dies", "cut", "break", "half_open", "torn") if kind in kinds]
    slots = [f"prefill-{i}" for i in range(scenario.prefill)] + [f"decode-{i}" for i in range(scenario.decode)]
    faults = list(scenario.faults)
    for _ in range(rng.randint(0, 4) if wanted and scenario.faults else 0):
        kind, slot = rng.choice(wanted), rng.choice(slots)
        other = slot + FAR if rng.random() < 0.5 else rng.choice(slots) + rng.choice(("", FAR))
        target = slot if other == slot + FAR else slot + rng.choice(("", FAR))
        seconds = KEEPALIVE_S if kind == "half_open" else rng.uniform(0.5, rng.choice((2.0, 20.0)))
        at = rng.uniform(0.0, span)
        fault = Fault(kind, at, slot if kind == "host_dies" else target, other, seconds)
        faults.append(_at_a_host(rng, fault, scenario) if rng.random() < 0.6 else fault)
    faults.sort(key=lambda fault: fault.at)
    sight = Sight(divided=True)
    return msgspec.structs.replace(scenario, host_counts=counts, sight=sight, faults=tuple(faults))


def _at_a_host(rng: random.Random, fault: Fault, scenario: Scenario) -> Fault:
    """Returns ``fault`` aimed at a worker that is at a request: at its own other host, or at its peer's."""
    request = max((rng.choice(scenario.requests) for _ in range(3)), key=lambda r: (not r.cancels, len(r.prompt)))
    return msgspec.structs.replace(
        fault,
        at=request.at,
        target=fault.target.partition("/")[0],
        other=rng.choice((FAR, PEER + FAR, PEER)),
        aim=rng.choice(PHASES),
        request=request.number,
        after=rng.choice((0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 1.0))),
    )


def tokens_of(rng: random.Random, count: int) -> tuple[int, ...]:
    """Draws ``count`` token ids."""
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))
