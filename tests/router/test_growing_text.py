"""Tests that what reads an answer as it comes keeps no growing string: each piece would copy all of those before
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.router.text.detokenize import StopStrings
from baton.router.text.reasoning_parsers import think
from baton.router.text.tool_parsers import (
    deepseek_v3,
    glm45,
    harmony,
    hermes,
    llama3,
    minimax_m2,
    mistral,
    qwen3_coder,
)

CHARACTERS, MOST_KEPT = 6000, 200
OLDER = {
    "hermes": hermes.make,
    "llama3": llama3.make,
    "mistral": mistral.make,
    "think": think.make,
    "thinking": lambda: think.make(True),
    "stops": lambda: StopStrings(["x" * 150 + "y", " " * 150 + "y"]),
}
BEGINNINGS = {
    "nothing": "",
    "hermes call": '<tool_call>{"name":"f","arguments":{"a":"',
    "hermes deep": '<tool_call>{"name":"f","arguments":',
    "hermes no call": "<tool_call>z",
    "llama3 call": '{"name":"f","parameters":{"a":"',
    "mistral calls": '[TOOL_CALLS][{"name":"f","arguments":{"a":"',
    "mistral call": '[TOOL_CALLS]f{"a":"',
    "mistral name": "[TOOL_CALLS]f",
    "thought": "<think>",
}
OWN = [
    (deepseek_v3.make, ""),
    (deepseek_v3.make, "<｜tool▁calls▁begin｜>"),
    (deepseek_v3.make, "<｜tool▁call▁begin｜>"),
    (deepseek_v3.make, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
    (deepseek_v3.make, '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a":"'),
    (glm45.make, ""),
    (glm45.make, "<tool_call>"),
    (glm45.make, "<tool_call>f<arg_key>"),
    (glm45.make, "<tool_call>f<arg_key>a</arg_key><arg_value>"),
    (harmony.make, ""),
    (harmony.make, "<|channel|>"),
    (harmony.make, "<|channel|>commentary to=functions.f<|message|>"),
    (minimax_m2.make, "<minimax:tool_call>"),
    (minimax_m2.make, '<invoke name="f">'),
    (minimax_m2.make, '<invoke name="f"><parameter name="a">'),
    (qwen3_coder.make, "<tool_call>"),
    (qwen3_coder.make, "<function="),
    (qwen3_coder.make, "<function=f><parameter=a>"),
]
READERS = [*itertools.product(OLDER.values(), BEGINNINGS.values()), *OWN]


def strings(thing: Any) -> Iterator[str]:
    """Every string that an object of ours holds as such, not as one of many pieces."""
    if isinstance(thing, str):
        yield thing
    elif type(thing).__module__.startswith("baton."):
        for name in getattr(thing, "__struct_fields__", None) or vars(thing):
            yield from strings(getattr(thing, name))


@pytest.mark.parametrize(("make", "beginning"), READERS)
@pytest.mark.parametrize("unit", ["x", " ", "[", "{"])
def test_no_string_grows_with_the_answer(make: Callable[[], Any], beginning: str, unit: str) -> None:
    made = make()
    made.push(beginning)
    for _ in range(CHARACTERS // 4):
        made.push(unit * 4)
    assert max(map(len, strings(made)), default=0) <= MOST_KEPT
