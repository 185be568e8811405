"""Has the clients of a drawn scenario ask otherwise: as chats, by other APIs, for documents in order.

Knows nothing of what is usual. Each draws from randomness of its own, so that the rest of a scenario stays.
"""

from __future__ import annotations

import random

import msgspec

from baton.drill.language.grammar import JSON
from baton.drill.language.ranking import WORDS, Ranking
from baton.drill.language.vocabulary import prompt_of
from baton.drill.scenario import FORCED, Request, Scenario, Tools
from baton.drill.specials import ADAPTERS, LOADED_S
from baton.protos.nouns import Grammar, Sampling


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


def with_tensors(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario`` with ``share`` of its requests for text over HTTP or gRPC by the Open Inference
    Protocol, as far as that has what they ask for.
    """
    rng = random.Random(f"tensors {scenario.seed}")

    def other(request: Request) -> Request:
        own = request.sampling
        if not request.over_http or own.pooling or request.messages or request.adapter or rng.random() >= share:
            return request
        own = msgspec.structs.replace(own, logprobs=None, prompt_logprobs=None)
        over_grpc = rng.random() < 0.5
        asked = msgspec.structs.replace(request, tensors=True, over_grpc=over_grpc, sampling=own)
        if request.over_http == "whole":
            return asked
        # Neither kind of stream says of which choice a part is, and that over HTTP begins with a text.
        return msgspec.structs.replace(asked, n=1, prompt=request.prompt if over_grpc else _text(rng, request))

    return msgspec.structs.replace(scenario, requests=tuple(map(other, scenario.requests)))


def _text(rng: random.Random, request: Request) -> tuple[int, ...]:
    """Returns a prompt that is the text of some words, about as long as the request's."""
    return tuple(_words(rng, 1 + len(request.prompt) // 6).encode())


def with_rankings(scenario: Scenario, share: float) -> Scenario:
    """Returns ``scenario`` with ``share`` of its requests over HTTP for documents in order."""
    rng = random.Random(f"rankings {scenario.seed}")
    queries = [_words(rng, rng.randint(1, 10)) for _ in range(2)]

    def other(request: Request) -> Request:
        if not request.over_http or request.over_grpc or request.adapter or rng.random() >= share:
            return request
        ranking = Ranking(
            rng.choice(queries),
            tuple(_words(rng, rng.randint(1, 15)) for _ in range(rng.choice((1, 3, 8)))),
            scores=rng.random() < 0.4,
            top=rng.choice((0, 0, 2)),
            document_tokens=rng.choice((0, 0, 9)),
        )
        named = (WORDS["yes"], WORDS["no"])
        asks = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, logprob_token_ids=named)
        return Request(
            request.number, request.at, ranking.prompt_of(0), asks,
            router=request.router, tenant=request.tenant, cancels=request.cancels,
            deadline_after=request.deadline_after, over_http="whole", ranking=ranking,
        )  # fmt: skip

    return msgspec.structs.replace(scenario, requests=tuple(map(other, scenario.requests)))
