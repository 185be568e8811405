"""Tests best_of: the likeliest answers per token come back, in order, and all of them are counted."""

from __future__ import annotations

import pytest

from baton.protos.nouns import TokenLogprob, TokenLogprobs, TokenRun
from baton.router.request.request import ChoiceStream

LIKELY = {0: -2.0, 1: -0.5, 2: -1.0, 3: -3.0}


@pytest.fixture
def uneven(fake, monkeypatch):
    """Choice i says letter i with LIKELY[i] per token."""

    async def run(request, stream: ChoiceStream) -> None:
        for index in range(request.sampling.max_tokens):
            token = 40 + stream.choice
            entry = TokenLogprobs(TokenLogprob(token, LIKELY[stream.choice], 1), ())
            reason = "length" if index + 1 == request.sampling.max_tokens else ""
            scored = (entry,) if request.sampling.logprobs is not None else ()
            stream.push(TokenRun(index, (token,), scored, reason, None))

    monkeypatch.setattr(fake, "_run", run)
    return fake


async def test_the_likeliest_of_each_prompts_answers_come_back_likeliest_first(router, uneven) -> None:
    asked = {"model": "tiny", "prompt": [[5], [6]], "max_tokens": 3, "n": 2, "best_of": 4}
    answer = await router.openai.completions.create(**asked, extra_body={"return_token_ids": True})
    ids = [choice.model_extra["token_ids"] for choice in answer.choices]
    assert ids == [[41] * 3, [42] * 3] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage.completion_tokens == 2 * 4 * 3
    assert {(r.n, r.sampling.logprobs) for r in uneven.requests} == {(4, 0)}


async def test_logprobs_are_shown_where_they_were_asked_for(router, uneven) -> None:
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 2, "best_of": 3}
    answer = await router.openai.completions.create(**asked, logprobs=1)
    [choice] = answer.choices
    assert choice.logprobs.token_logprobs == [-0.5, -0.5]
    same = await router.openai.completions.create(**asked | {"best_of": 1})
    assert (len(same.choices), same.usage.completion_tokens) == (1, 2)
