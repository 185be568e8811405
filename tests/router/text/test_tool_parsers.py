"""Every tool parser and reasoning parser: the same events however the text is cut, and never a lost character."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.protos.errors import ConfigError
from baton.router.text import reasoning_parsers, tool_parsers
from baton.router.text.tool_events import ArgumentsEvent, CallEvent, TextEvent

ARGS = {"city": 'Zürich "old"\n', "days": [1, {"a": "}"}], "x": None}
TEXT = json.dumps(ARGS, ensure_ascii=False)
ONE = f'{{"name": "weather", "arguments": {TEXT}}}'
TURNED = f'{{"arguments": {TEXT}, "name": "weather"}}'
QUOTED = f'{{"name": "weather", "arguments": {json.dumps(TEXT)}}}'
SIMPLE = '{"name": "now", "parameters": {}}'
WEATHER, NOW = ("weather", ARGS), ("now", {})
CASES = {
    "hermes": [
        ("Just text.", "Just text.", []),
        (f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>", "Let me see.\n", [WEATHER]),
        (f"<tool_call>{TURNED}</tool_call>\n<tool_call>{SIMPLE}</tool_call>\n", "", [WEATHER, NOW]),
        (f"<tool_call>{QUOTED}</tool_call>", "", [WEATHER]),
        (f"<tool_call>{ONE}", "", [WEATHER]),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>no json</tool_call> hm", "<tool_call>no json</tool_call> hm", []),
        ('<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
        (
            f'<tool_call>{{"x": 1}}</tool_call><tool_call>{SIMPLE}</tool_call>',
            '<tool_call>{"x": 1}</tool_call>',
            [NOW],
        ),
        (f"<tool_call>{SIMPLE}</tool_call>\n \nSo it is.\n", "\n \nSo it is.\n", [NOW]),
        (f"<tool_call>{SIMPLE}</tool_call> <tool_call>1</tool_call>", " <tool_call>1</tool_call>", [NOW]),
    ],
    "llama3": [
        ("Just text.", "Just text.", []),
        (ONE, "", [WEATHER]),
        (f"<|python_tag|>{ONE}; {SIMPLE}", "", [WEATHER, NOW]),
        (f"\n{QUOTED}", "", [WEATHER]),
        ('{"a": 1}', '{"a": 1}', []),
        ('{"a": 1', '{"a": 1', []),
        ("<|python", "<|python", []),
        ("{ not json", "{ not json", []),
    ],
    "mistral": [
        ("Just text.", "Just text.", []),
        (f"[TOOL_CALLS] [{ONE}, {SIMPLE}]", "", [WEATHER, NOW]),
        (f"[TOOL_CALLS]weather[ARGS]{TEXT}[TOOL_CALLS]now[ARGS]{{}}", "", [WEATHER, NOW]),
        (f"[TOOL_CALLS]weather[CALL_ID]a1b2[ARGS]{TEXT}", "", [WEATHER]),
        ("So: [TOOL_CALLS]now{}", "So: ", [NOW]),
        ("[TOOL_CALLS]now{}\n \nSo it is. ", "\n \nSo it is. ", [NOW]),
        ("[TOOL", "[TOOL", []),
        ("[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    ],
}
FLAT = [(name, *case) for name, cases in CASES.items() for case in cases]


def read(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    parser = tool_parsers.load(name).make()
    events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
    called: list[list[str]] = []
    for event in events:
        if isinstance(event, CallEvent):
            assert event.index == len(called)
            called.append([event.name, ""])
        elif isinstance(event, ArgumentsEvent):
            called[event.index][1] += event.text
    said = "".join(event.text for event in events if isinstance(event, TextEvent))
    return said, [(call, json.loads(arguments)) for call, arguments in called]


def cut(text: str, places: set[int]) -> list[str]:
    at = sorted({0, len(text)} | {p % (len(text) + 1) for p in places})
    return [text[a:b] for a, b in pairwise(at)]


def test_every_file_of_the_folder_has_cases() -> None:
    assert sorted(CASES) == tool_parsers.names()


@pytest.mark.parametrize(("name", "text", "said", "calls"), FLAT)
def test_text_and_calls_are_told_apart_whole_and_one_character_at_a_time(name, text, said, calls) -> None:
    assert read(name, [text]) == (said, calls)
    assert read(name, list(text)) == (said, calls)


@given(st.sampled_from(FLAT), st.sets(st.integers(0, 300)))
def test_where_the_text_is_cut_changes_nothing(case, places) -> None:
    name, text, said, calls = case
    assert read(name, cut(text, places)) == (said, calls)


PIECES = [*'{}[]":,x\\ <é', '"name"', '"arguments"', '{"name": "f", "arguments": {']
MARKED = st.lists(
    st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", *PIECES]),
    max_size=30,
).map("".join)


@given(st.sampled_from(tool_parsers.names()), MARKED, st.sets(st.integers(0, 200)))
@example("llama3", "<|python_tag|>[TOOL_CALLS]", set())
@example("llama3", "<|python_tag|>,", set())
@example("llama3", '{"name": "f", "arguments": {}:', set())
def test_any_text_is_read_without_a_crash_and_alike_however_it_is_cut(name, text, places) -> None:
    def events(pieces: list[str]) -> tuple[str, dict[int, str], list[CallEvent]]:
        parser = tool_parsers.load(name).make()
        found = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
        arguments: dict[int, str] = {}
        for event in found:
            if isinstance(event, ArgumentsEvent):
                arguments[event.index] = arguments.get(event.index, "") + event.text
        said = "".join(event.text for event in found if isinstance(event, TextEvent))
        return said, arguments, [event for event in found if isinstance(event, CallEvent)]

    whole = events([text])
    assert events(list(text)) == whole
    if not whole[2] and name != "mistral":
        assert whole[0] == text.removeprefix("<|python_tag|>" if name == "llama3" else "")


def test_arguments_stream_as_they_are_written() -> None:
    parser = tool_parsers.load("hermes").make()
    parser.push('<tool_call>{"name": "weather", "arguments": {"city": "Zü')
    assert parser.push("rich") == [ArgumentsEvent(0, "rich")]


@pytest.mark.parametrize(
    ("template", "name"),
    [("… <tool_call> …", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3"), ("", "hermes")],
)
def test_the_parser_is_found_by_what_the_chat_template_mentions(template: str, name: str) -> None:
    assert tool_parsers.load("auto", template).__name__.endswith(name)


def test_an_unknown_parser_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="hermes, llama3, mistral"):
        tool_parsers.load("xml")
    with pytest.raises(ConfigError, match="auto, none, think"):
        reasoning_parsers.load("xml")


@pytest.mark.parametrize(
    ("thinking", "text", "thought", "answer"),
    [
        (False, "<think>\nHm, 2 < 3.\n</think>\n\nYes.", "Hm, 2 < 3.\n", "Yes."),
        (False, "No <think> here", "", "No <think> here"),
        (False, "<thi", "", "<thi"),
        (False, "<think>never ends", "never ends", ""),
        (True, "Hm.</think>Yes.", "Hm.", "Yes."),
        (True, "Hm.</thi", "Hm.</thi", ""),
        (False, "", "", ""),
    ],
)
def test_a_thought_is_split_from_the_answer(thinking: bool, text: str, thought: str, answer: str) -> None:
    for pieces in ([text], list(text), cut(text, {3, 9, 14})):
        parser = reasoning_parsers.load("think").make(thinking)
        found = [*(parser.push(piece) for piece in pieces), parser.flush()]
        assert ("".join(t for t, _ in found), "".join(a for _, a in found)) == (thought, answer)
