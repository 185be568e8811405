"""Makes a drawn scenario special: sequences that are preempted, prompts in tiers, leases that nearly run out, batch
jobs that routers lose, text over HTTP, adapters.

Knows nothing of what is usual. Each draws from randomness of its own, so that the rest of a scenario stays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgspec

from baton.drill.language.grammar import JSON
from baton.drill.language.oracle import VOCABULARY, Sight
from baton.drill.language.vocabulary import prompt_of
from baton.drill.scenario import (
    FORCED,
    REDIS,
    SLOW_STEP_S,
    AdapterChange,
    Batch,
    Fault,
    PageKind,
    Request,
    Scenario,
    Size,
    Tools,
)
from baton.protos.nouns import Grammar, Sampling

Special = Callable[[Scenario, float], Scenario]  # makes a scenario, which lasts for so many seconds, special
FED = ("reading", "receiving")  # phases in which a prompt is on its way
LOADED_S = 5.0  # seconds after which the first adapters are loaded, if nothing goes wrong
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


def with_chats(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario`` with ``share`` of its requests for text over HTTP as chats, some with tools."""
    rng = random.Random(f"chats {scenario.seed}")
    heads = [_words(rng, rng.randint(1, 40)) for _ in range(3)]

    def chat(request: Request) -> Request:
        own = request.sampling
        if not request.over_http or own.pooling or own.prompt_logprobs is not None or rng.random() >= share:
            return request
        return _chat(rng, request, rng.choice(heads))

    return msgspec.structs.replace(scenario, requests=tuple(map(chat, scenario.requests)))


def _chat(rng: random.Random, request: Request, head: str) -> Request:
    tools: Tools = rng.choice(("", "", "auto", "auto", "named", "required"))
    own, thinks = request.sampling, rng.random() < 0.4
    if tools in FORCED or rng.random() < 0.1:  # the answer is JSON, which nothing but its length may end
        spec = '{"type": "array"}' if tools == "required" else '{"type": "object"}'
        tools = tools if tools in FORCED else ""
        own = msgspec.structs.replace(own, grammar=Grammar(JSON, spec), min_tokens=0, stop_token_ids=())
        request, thinks = msgspec.structs.replace(request, stops=()), False
    messages = (head, *(_words(rng, rng.randint(0, 12)) for _ in range(rng.choice((0, 0, 2, 4)))))
    prompt = prompt_of(messages, bool(tools), thinks)
    plain = request.n == 1 and own.logprobs is None and not request.adapter
    request = msgspec.structs.replace(request, anthropic=plain and rng.random() < 0.5)
    changed = {"messages": messages, "prompt": prompt, "tools": tools, "thinks": thinks, "sampling": own}
    return msgspec.structs.replace(request, **changed)


def with_surfaces(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario`` with ``share`` of its requests for text over gRPC, or the Responses API, as far as these
    have what they ask for.
    """
    rng = random.Random(f"surfaces {scenario.seed}")

    def other(request: Request) -> Request:
        own = request.sampling
        if not request.over_http or own.pooling or request.anthropic or rng.random() >= share:
            return request
        if not request.messages:  # over gRPC a key alone names a tenant
            return msgspec.structs.replace(request, over_grpc=not request.tenant and _settled(scenario, request))
        plain = request.n == 1 and own.logprobs is None
        return msgspec.structs.replace(request, responses=plain)

    return msgspec.structs.replace(scenario, requests=tuple(map(other, scenario.requests)))


def _settled(scenario: Scenario, request: Request) -> bool:
    """Returns whether no adapter's name changes while the call of ``request`` is on its way."""
    if not request.adapter:
        return True
    return len(scenario.adapters) == len(ADAPTERS) and request.at > LOADED_S and not scenario.faults


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("river", "so", "é", "<tool_call>", "7")) for _ in range(count))


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


def _bounded(rng: random.Random, request: Request) -> Request:
    """Returns ``request``, in two of five cases with a bound on the drafts of a step, if its client can ask so."""
    most = rng.choice((None, None, None, 0, 2))
    if most is None or request.sampling.pooling or request.anthropic:
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


def tokens_of(rng: random.Random, count: int) -> tuple[int, ...]:
    """Draws ``count`` token ids."""
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))
