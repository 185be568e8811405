"""Finds what is wrong with the reply to a request for documents in order. Shares no code with the router's."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from baton.drill.language.oracle import Sight
from baton.drill.language.ranking import CLOSE
from baton.drill.scenario import Request


def wrong_ranking(request: Request, body: bytes, sight: Sight) -> Iterator[str]:
    """Yields what is wrong with a reply with status 200."""
    asked, reply = request.ranking, orjson.loads(body)
    assert asked is not None
    want = asked.wanted(sight)
    name = "score" if asked.scores else "relevance_score"
    told = [(one["index"], one[name]) for one in (reply["data"] if asked.scores else reply["results"])]
    order = sorted(range(len(want)), key=lambda at: at if asked.scores else -want[at])
    order = order[: asked.top] if asked.top and not asked.scores else order
    places, scores = [at for at, _ in told], [score for _, score in told]
    if len(set(places)) < len(places) or not set(places) <= set(range(len(want))):
        yield f"documents {places} are told of {len(want)}, each once at most"
        return
    # Documents of one score may come in any order.
    same = places == order if asked.scores else [want[at] for at in places] == [want[at] for at in order]
    if not same:
        yield f"documents {places} are told, and {order} are the best"
    if any(abs(score - want[at]) > CLOSE for at, score in told):
        yield f"scores {told} are not the oracle's, {want}"
    if len(told) != len(order) or (not asked.scores and scores != sorted(scores, reverse=True)):
        yield f"{len(told)} documents of {len(order)} are told, or not in their order: {told}"
    tokens = sum(len(asked.prompt_of(at)) for at in range(len(want)))
    if (reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]) != (tokens, tokens):
        yield f"usage {reply['usage']}, and there are {tokens} tokens"
