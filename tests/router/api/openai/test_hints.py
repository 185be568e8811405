"""Hints about caching in a request: what counts as one, and that no template sees it."""

from __future__ import annotations

from typing import Any

import pytest

from baton.router.api.openai.schemas import ChatBody, CompletionBody

MARK = {"cache_control": {"type": "ephemeral"}}


def chat(**fields: Any) -> ChatBody:
    body = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]} | fields
    return ChatBody.model_validate(body)


@pytest.mark.parametrize(
    ("fields", "retained"),
    [
        ({}, False),
        ({"prompt_cache_retention": "24h"}, True),
        ({"prompt_cache_retention": "in-memory"}, False),
        ({"prompt_cache_retention": {"non": "sense"}}, False),
        ({"messages": [{"role": "user", "content": "hi", **MARK}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **MARK}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, False),
    ],
)
def test_a_prefix_is_retained_where_the_client_says_so(fields: dict[str, Any], retained: bool) -> None:
    body = chat(**fields)
    assert body.retained is retained
    assert all("cache_control" not in message.plain() for message in body.messages)


def test_completions_hint_by_retention() -> None:
    assert CompletionBody.model_validate({"prompt": "x", "prompt_cache_retention": "24h"}).retained
    assert not CompletionBody.model_validate({"prompt": "x"}).retained
