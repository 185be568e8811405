"""Harmony's answers: thoughts, calls and text in the order in which they come, from where the prompt ends."""

from __future__ import annotations

import pytest

from baton.router.text import tool_parsers
from baton.router.text.tool_events import ArgumentsEvent, CallEvent, TextEvent, ThoughtEvent
from baton.router.text.tool_parsers import ParserContext
from tests.router.text.test_tool_parsers import CONTEXT, FINAL, TEXT, TO_WEATHER, cut

SAME = ParserContext(CONTEXT.schemas, prompt="<|start|>user<|message|>Weather?<|end|><|start|>assistant")


def test_harmony_tells_thoughts_apart_in_the_order_in_which_they_come() -> None:
    text = (
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{TO_WEATHER}<|call|>"
        "<|start|>assistant<|channel|>analysis<|message|>Warm.<|end|>" + FINAL + "Sunny."
    )
    for context in (CONTEXT, SAME):
        for pieces in ([text], list(text), cut(text, {7, 30, 90, 171})):
            parser = tool_parsers.load("harmony").make(context)
            events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
            order = [
                type(event)
                for event, before in zip(events, [None, *events], strict=False)
                if type(event) is not type(before)
            ]
            assert order == [ThoughtEvent, CallEvent, ArgumentsEvent, ThoughtEvent, TextEvent]
            thoughts = [event.text for event in events if isinstance(event, ThoughtEvent)]
            assert "".join(thoughts) == "Hm.Warm."


@pytest.mark.parametrize(
    ("prompt", "text", "said"),
    [
        ("<|start|>assistant", "<|channel|>fi", ""),
        ("<|start|>assistant", "to", "to"),
        ("<|start|>assistant<|channel|>final<|message|>It is", " sunny.<|return|>", " sunny."),
        ("<|start|>assistant<|channel|>final<|message|>It is", " to=", " to="),
    ],
)
def test_harmony_begins_in_the_message_in_which_the_prompt_ends(prompt, text, said) -> None:
    for pieces in ([text], list(text)):
        parser = tool_parsers.load("harmony").make(ParserContext(prompt=prompt))
        events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
        assert "".join(event.text for event in events if isinstance(event, TextEvent)) == said


def test_harmony_gives_as_text_what_nobody_reads_apart() -> None:
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{TO_WEATHER}"
    parser = tool_parsers.load("harmony").make(ParserContext(reads_calls=False, splits_thoughts=False))
    assert "".join(event.text for event in parser.push(text) + parser.flush()) == f"Hm.{TEXT}"
