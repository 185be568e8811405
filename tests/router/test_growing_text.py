"""Tests that what reads an answer as it comes keeps no growing string: each piece would copy all of those before
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.router.text.detokenize import StopStrings
from baton.router.text.reasoning_parsers import think
from baton.router.text.tool_parsers import hermes, llama3, mistral

CHARACTERS, MOST_KEPT = 6000, 200
READERS = {
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


def strings(thing: Any) -> Iterator[str]:
    """Every string that an object of ours holds as such, not as one of many pieces."""
    if isinstance(thing, str):
        yield thing
    elif type(thing).__module__.startswith("baton."):
        for value in vars(thing).values():
            yield from strings(value)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("unit", ["x", " ", "[", "{"])
def test_no_string_grows_with_the_answer(reader: str, beginning: str, unit: str) -> None:
    made = READERS[reader]()
    made.push(BEGINNINGS[beginning])
    for _ in range(CHARACTERS // 4):
        made.push(unit * 4)
    assert max(map(len, strings(made)), default=0) <= MOST_KEPT
