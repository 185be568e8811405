"""Breakpoints of the cache: how many tokens lie before them, what a usage says of them; prompts stay the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from baton.router.answer.stream import Usage
from baton.router.api.anthropic.conversation import chat_messages
from baton.router.api.anthropic.shape import _usage
from baton.router.request.context import MarkedTokens
from tests.router.api.anthropic.test_messages import TOOL, TURN, create, prompted

__all__ = ["prompted"]  # a fixture
MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CACHED = 16  # tokens of each prompt that the fake's cache has
SYSTEM = "Be brief, and always say where you know it from."
BEFORE = f"<|begin|><|system|>{SYSTEM}"


def text(said: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **mark}


@pytest.mark.parametrize(
    ("fields", "before"),
    [
        ({"system": [text(SYSTEM, **MARK)]}, BEFORE + "<|end|>"),
        ({"system": [text(SYSTEM, **MARK), text("Today is Monday.")]}, BEFORE),
        ({"system": SYSTEM, "tools": [TOOL | MARK]}, BEFORE + "<|end|>"),
        (
            {"system": SYSTEM, "messages": [{"role": "user", "content": [text("A book.", **MARK), text("Who?")]}]},
            BEFORE + "<|end|><|user|>A book.",
        ),
    ],
    ids=["system", "block of it", "tools", "block of a turn"],
)
async def test_a_hint_is_about_the_tokens_before_the_last_breakpoint(
    router, fake, tokenizer, fields: dict[str, Any], before: str
) -> None:
    answer = await create(router, **fields)
    context, prompt = fake.requests[-1].context, list(fake.requests[-1].token_ids)
    wanted = tokenizer.encode(before, False)
    assert abs(context.retained_tokens - len(wanted)) <= 1, "a token may join what is on both sides"
    assert prompt[: context.retained_tokens] == wanted[: context.retained_tokens]
    assert context.retained
    usage = answer.usage
    assert usage.cache_creation_input_tokens == usage.cache_creation.ephemeral_5m_input_tokens
    assert usage.cache_creation_input_tokens == context.retained_tokens - CACHED
    assert usage.input_tokens == len(prompt) - context.retained_tokens


@pytest.mark.parametrize("fields", [MARK, {"messages": [{"role": "user", "content": [text("Hello", **MARK)]}]}])
async def test_behind_the_whole_conversation_it_is_about_the_answer_too(router, fake, fields) -> None:
    answer = await create(router, system=SYSTEM, **fields)
    context = fake.requests[-1].context
    assert (context.retained, context.retained_tokens) == (True, 0)
    assert answer.usage.input_tokens == 0
    assert answer.usage.cache_creation_input_tokens == len(fake.requests[-1].token_ids) - CACHED


async def test_breakpoints_of_both_times_to_live_are_counted_apart(router, fake) -> None:
    answer = await create(
        router, system=[text(SYSTEM, **HOUR)], messages=[{**TURN, "content": [text("Hi", **MARK)]}]
    )
    created, tokens = answer.usage.cache_creation, len(fake.requests[-1].token_ids) - CACHED
    assert 0 < created.ephemeral_1h_input_tokens < tokens
    assert created.ephemeral_5m_input_tokens == tokens - created.ephemeral_1h_input_tokens


@pytest.mark.parametrize("mark", [True, "x", [1], {"ttl": 7, "chars": -3}, {"chars": 10**12}])
async def test_a_breakpoint_of_an_odd_kind_is_one_of_the_default(router, fake, mark: object) -> None:
    await create(router, system=[text(SYSTEM)])
    plain = fake.requests[-1].token_ids
    answer = await create(router, system=[text(SYSTEM, cache_control=mark)])
    assert fake.requests[-1].token_ids == plain
    assert 0 < answer.usage.cache_creation.ephemeral_5m_input_tokens < len(plain)


def test_thousands_of_breakpoints_are_placed_without_joining_their_texts_for_each() -> None:
    blocks, joins = [text("x" * 1990, cache_control=1) for _ in range(4000)], 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal joins
        joins += event == "c_call" and getattr(argument, "__name__", "") == "join"

    sys.setprofile(note)
    try:
        system, turn = chat_messages(blocks, [{"role": "user", "content": blocks}])
    finally:
        sys.setprofile(None)
    assert joins == 2  # one for each message
    for message in (system, turn):
        assert [mark["chars"] for mark in message["cache_control"]] == [1991 * n - 1 for n in range(1, 4001)]
    assert len(turn["content"]) == 1991 * 4000 - 1


async def test_without_breakpoints_nothing_counts_as_created(router, fake) -> None:
    answer = await create(router, system=SYSTEM)
    assert (answer.usage.cache_creation_input_tokens, fake.requests[-1].context.retained) == (0, False)


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (0, {"input": 40, "5m": 20, "1h": 40}),
        (30, {"input": 40, "5m": 20, "1h": 10}),
        (50, {"input": 40, "5m": 10, "1h": 0}),
        (80, {"input": 20, "5m": 0, "1h": 0}),
    ],
)
def test_what_was_read_from_the_cache_was_not_created(read: int, told: dict[str, int]) -> None:
    usage = _usage(Usage(100, 7, read), MarkedTokens(hour=40, minutes=60))
    assert usage["cache_creation"] == {
        "ephemeral_5m_input_tokens": told["5m"],
        "ephemeral_1h_input_tokens": told["1h"],
    }
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (told["input"], read)
    counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[name] for name in counts) == 100
