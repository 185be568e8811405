"""Text over gRPC, the Responses API and the Open Inference Protocol is the oracle's in the simulated cluster, and
so is the order of documents.
"""

from __future__ import annotations

import msgspec
import orjson

from baton.drill.checks.ranking import wrong_ranking
from baton.drill.checks.responses import read_responses
from baton.drill.draw import draw
from baton.drill.language.oracle import Sight
from baton.drill.language.ranking import Ranking
from baton.drill.language.vocabulary import prompt_of
from baton.drill.run import play
from baton.drill.scenario import Request, Scenario, Size
from baton.protos.nouns import Sampling

ASKS = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
NAMED = msgspec.structs.replace(ASKS, max_tokens=1, logprobs=0, logprob_token_ids=(700, 701))
WORDS = ("river so é",)


def one_of_each(requests: tuple[Request, ...]) -> Scenario:
    quiet = draw(3, Size(workers=1, requests=1, kinds=(), pressed=0.0, pinned=0.0, scaled=0.0, adapted=0.0))
    plain = {"batches": (), "pages": 300, "step_s": 0.02, "local_max": 0, "controller": False}
    return msgspec.structs.replace(quiet, requests=requests, **plain)


def test_text_over_grpc_is_the_oracles_and_who_leaves_leaves_nothing_behind() -> None:
    first = Request(0, 0.0, tuple(range(60)), ASKS, over_http="stream", over_grpc=True)
    scored = msgspec.structs.replace(ASKS, logprobs=2, prompt_logprobs=1)
    special = [
        {},
        {"over_http": "whole", "n": 2, "stops": ("7>",)},
        {"sampling": scored, "n": 2},
        {"sampling": scored, "prompt": (7,)},
        {"cancels": (0.2,)},
        {"deadline_after": 0.2},
    ]
    asked = tuple(msgspec.structs.replace(first, number=i, at=0.1 * i, **own) for i, own in enumerate(special))
    verdict = play(one_of_each(asked), keep_story=True)
    assert verdict.held, verdict.violations
    said = [line.split(maxsplit=3)[3] for line in verdict.lines if " client " in line and "asks" not in line]
    assert said.count("complete") == 4
    assert any("DEADLINE" in line for line in said)
    assert any(line.startswith("left after") for line in said)


def test_text_that_is_asked_as_tensors_is_the_oracles() -> None:
    first = Request(0, 0.0, tuple(b"river so river"), ASKS, over_http="stream", tensors=True)
    special = [
        {},
        {"over_http": "whole", "n": 2, "stops": ("7>",)},
        {"over_http": "whole", "tenant": "a"},
        {"over_grpc": True, "prompt": tuple(range(300, 360))},
        {"over_grpc": True, "over_http": "whole", "n": 2},
        {"over_grpc": True, "cancels": (0.2,)},
        {"over_grpc": True, "deadline_after": 0.2},
    ]
    asked = tuple(msgspec.structs.replace(first, number=i, at=0.1 * i, **own) for i, own in enumerate(special))
    verdict = play(one_of_each(asked), keep_story=True)
    assert verdict.held, verdict.violations
    said = [line.split(maxsplit=3)[3] for line in verdict.lines if " client " in line and "asks" not in line]
    complete = [line for line in said if line in ("complete", "status 200, complete")]
    assert len(complete) == 5
    assert any("DEADLINE" in line or "deadline" in line for line in said)
    assert any(line.startswith("left after") for line in said)


def test_documents_are_told_in_the_order_of_the_oracles_scores() -> None:
    documents = ("so", "river", "7", "é river", "so so")
    kinds = (Ranking("7", documents), Ranking("7", documents, scores=True), Ranking("7", documents, top=2))
    asked = tuple(
        Request(i, 0.1 * i, ranking.prompt_of(0), NAMED, over_http="whole", ranking=ranking)
        for i, ranking in enumerate(kinds)
    )
    verdict = play(one_of_each(asked), keep_story=True)
    assert verdict.held, verdict.violations
    assert verdict.answered == 3


def test_a_ranking_in_another_order_is_seen() -> None:
    ranking = Ranking("7", ("so", "river"))
    asked = Request(0, 0.0, ranking.prompt_of(0), NAMED, over_http="whole", ranking=ranking)
    scores, tokens = ranking.wanted(Sight()), sum(len(ranking.prompt_of(at)) for at in range(2))
    best = sorted(range(2), key=lambda at: -scores[at])

    def said(order: list[int], scores: list[float]) -> list[str]:
        results = [{"index": at, "relevance_score": scores[at]} for at in order]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return list(wrong_ranking(asked, orjson.dumps({"results": results, "usage": usage}), Sight()))

    assert not said(best, scores)
    assert said(best[::-1], scores)
    assert said(best[:1], scores)
    assert said(best, scores[::-1])


def test_a_response_is_the_oracles_chat() -> None:
    chat = {"messages": WORDS, "tools": "auto", "responses": True}
    asks, prompt = msgspec.structs.replace(ASKS, max_tokens=200), prompt_of(WORDS, True, False)
    asked = tuple(
        Request(i, 0.1 * i, prompt, asks, over_http=how, **chat)
        for i, how in enumerate(("stream", "whole", "stream"))
    )
    verdict = play(one_of_each(asked), keep_story=True)
    assert verdict.held, verdict.violations
    assert verdict.answered == 3


def test_a_response_whose_events_add_up_to_something_else_is_not_whole() -> None:
    item = {"type": "message", "id": "msg_0", "content": [{"type": "output_text", "text": "so"}]}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    response = {"output": [item], "status": "completed", "usage": usage}
    told = [
        {"type": "response.created"},
        {"type": "response.in_progress"},
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}},
        {"type": "response.output_text.delta", "output_index": 0, "delta": "so"},
        {"type": "response.output_text.done", "output_index": 0, "text": "so"},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": response},
    ]
    assert read_responses(ASKED, stream(told)).whole
    for at in range(len(told)):
        assert not read_responses(ASKED, stream(told[:at] + told[at + 1 :])).whole, told[at]["type"]
    assert not read_responses(ASKED, stream([*told[:3], told[3] | {"delta": "no"}, *told[4:]])).whole


ASKED = Request(0, 0.0, (), ASKS, over_http="stream", messages=WORDS, responses=True)


def stream(told: list[dict[str, object]]) -> bytes:
    """Returns events as the server writes them, numbered one by one."""
    events = (event | {"sequence_number": at} for at, event in enumerate(told))
    return b"".join(b"event: %s\ndata: %s\n\n" % (str(e["type"]).encode(), orjson.dumps(e)) for e in events)
