"""Tests that what clients say of speculation reaches the workers, and what became of drafts is told in the
usage.
"""

from __future__ import annotations

import pytest

from baton.protos.nouns import TokenRun
from baton.router.answer.stream import Usage
from baton.router.api.openai.shapes import usage_json
from baton.router.request.request import ChoiceStream, ChoiceSummary, joined, unseen

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say it"}]}


@pytest.mark.parametrize(
    "content", ["The fox", [{"type": "text", "text": "The "}, {"type": "text", "text": "fox"}]]
)
async def test_a_prediction_reaches_dispatch_as_tokens(router, fake, tokenizer, content) -> None:
    body = CHAT | {"prediction": {"type": "content", "content": content}}
    answer = await router.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert "x-baton-ignored" not in answer.headers
    assert tokenizer.decode(list(fake.requests[0].prediction)) == "The fox"
    assert fake.requests[0].sampling.max_drafts is None


async def test_speculation_is_bounded_or_turned_off_by_its_request(router, fake) -> None:
    for most in (0, 4):
        answer = await router.http.post("/v1/chat/completions", json=CHAT | {"speculative.n_max": most})
        assert answer.status_code == 200
    assert [request.sampling.max_drafts for request in fake.requests] == [0, 4]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculative.n_max": -1}, "speculative.n_max"),
        ({"speculative.n_max": "few"}, "speculative.n_max"),
        ({"prediction": "The fox"}, "prediction"),
        ({"prediction": {"type": "magic", "content": "x"}}, "prediction.type"),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it(router, fields, param) -> None:
    answer = await router.http.post("/v1/chat/completions", json=CHAT | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_usage_tells_of_drafts_where_there_were_any() -> None:
    assert "completion_tokens_details" not in usage_json(Usage(1, 2, 0))
    details = usage_json(Usage(1, 9, 0, 5, 3))["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 3}


def test_drafts_are_counted_once_however_runs_are_joined_or_repeated() -> None:
    first, then = TokenRun(0, (1, 2, 3), accepted_drafts=2, rejected_drafts=4), TokenRun(3, (4,), rejected_drafts=1)
    both = joined([first, then])
    assert (both.token_ids, both.accepted_drafts, both.rejected_drafts) == ((1, 2, 3, 4), 2, 5)
    rest = unseen(first, 2)
    assert rest is not None
    assert (rest.output_index, rest.token_ids, rest.accepted_drafts) == (2, (3,), 1)
    stream = ChoiceStream(0, ChoiceSummary(prompt_tokens=3))
    for run in (first, first, then):
        stream.push(run)
    assert (stream.summary.accepted_drafts, stream.summary.rejected_drafts) == (2, 5)
