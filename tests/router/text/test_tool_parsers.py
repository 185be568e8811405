"""Every tool parser and reasoning parser: the same events however the text is cut, and never a lost character."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.cluster.config import RouterConfig
from baton.protos.errors import ConfigError
from baton.router.text import reasoning_parsers, tool_parsers
from baton.router.text.tool_events import ArgumentsEvent, CallEvent, TextEvent
from baton.router.text.tool_parsers import ParserContext

ARGS = {"city": 'Zürich "old"\n', "days": [1, {"a": "}"}], "x": None}
TEXT = json.dumps(ARGS, ensure_ascii=False)
ONE = f'{{"name": "weather", "arguments": {TEXT}}}'
TURNED = f'{{"arguments": {TEXT}, "name": "weather"}}'
BOTH = f'{{"name": "weather", "arguments": {TEXT}, "parameters": {{"a": 1}}}}'
QUOTED = f'{{"name": "weather", "arguments": {json.dumps(TEXT)}}}'
SIMPLE = '{"name": "now", "parameters": {}}'
WEATHER, NOW = ("weather", ARGS), ("now", {})
TYPES = {"city": {"type": "string"}, "days": {"type": "array"}, "x": {"type": ["null", "integer"]}}
CONTEXT = ParserContext({"weather": {"type": "object", "properties": TYPES}})
CODER = (
    '<function=weather>\n<parameter=city>\nZürich "old"\n\n</parameter>\n<parameter=days>\n[1, {"a": "}"}]\n'
    "</parameter>\n<parameter=x>\nNone\n</parameter>\n</function>"
)
CODER_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
GLM = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich "old"\n</arg_value>\n<arg_key>days</arg_key>'
    '<arg_value>[1, {"a": "}"}]</arg_value>\n<arg_key>x</arg_key>\n<arg_value>null</arg_value>\n</tool_call>'
)
INVOKE = (
    '<invoke name="weather">\n<parameter name="city">Zürich "old"\n</parameter>\n'
    '<parameter name="days">[1, {"a": "}"}]</parameter>\n<parameter name="x">null</parameter>\n</invoke>\n'
)
INVOKED = f'<minimax:tool_call>\n{INVOKE}<invoke name="now">\n</invoke>\n</minimax:tool_call>'
FENCED = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{TEXT}\n```<｜tool▁call▁end｜>"
PLAIN = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{TEXT}<｜tool▁call▁end｜>"
PLAIN_NOW = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{TEXT}<|tool_call_end|>"
KIMI_NOW = "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
SEED = (
    '<seed:tool_call>\n<function=weather>\n<parameter=city>Zürich "old"\n</parameter>\n'
    '<parameter=days>[1, {"a": "}"}]</parameter>\n<parameter=x>null</parameter>\n</function>\n</seed:tool_call>'
)
SEED_NOW = "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO_WEATHER = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{TEXT}"
CASES = {
    "deepseek_v3": [
        ("Just text.", "Just text.", []),
        (f"So:{SECTION}{PLAIN}{PLAIN_NOW}{SECTION_END}\nDone.", "So:\nDone.", [WEATHER, NOW]),
        (f"{SECTION}{FENCED}\n{FENCED}{SECTION_END}", "", [WEATHER, WEATHER]),
        (f"{PLAIN}{PLAIN_NOW}\n", "", [WEATHER, NOW]),
        (f"{SECTION}{PLAIN[:-10]}", "", [WEATHER]),
        (f"{SECTION}<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>", "", [NOW]),
        (
            '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"x": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜>',
            "",
            [("weather", {"x": "<｜tool▁call▁end｜>"})],
        ),
        (f"{SECTION}\n{SECTION_END}, no", f"{SECTION}\n{SECTION_END}, no", []),
        (f"{SECTION}no{SECTION_END}", f"{SECTION}no{SECTION_END}", []),
        ("<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}", "<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}", []),
        ("<｜tool▁call▁beg", "<｜tool▁call▁beg", []),
    ],
    "glm45": [
        ("Just text.", "Just text.", []),
        (f"Let me see.\n{GLM}\n<tool_call>now</tool_call>\nDone.", "Let me see.\n\nDone.", [WEATHER, NOW]),
        ("<tool_call>now\n</tool_call>\n", "", [NOW]),
        ("<tool_call>no json</tool_call> hm", "<tool_call>no json</tool_call> hm", []),
        ("<tool_call>now", "<tool_call>now", []),
        ("<tool_call>now\n</x> <tool_call>now</tool_call>", "<tool_call>now\n</x> ", [NOW]),
        ("<tool_call> </tool_call>", "<tool_call> </tool_call>", []),
        (
            "<tool_call>f<arg_key>a</arg_key><arg_value>1 < 2</arg_value><arg_key>b</arg_key><arg_value>2.5"
            "</arg_value></tool_call>",
            "",
            [("f", {"a": "1 < 2", "b": 2.5})],
        ),
        ("<tool_call>weather<arg_key>x</arg_key></tool_call>", "", [("weather", {})]),
    ],
    "harmony": [
        ("Just text.", "Just text.", []),
        ("assistant", "assistant", []),
        ("to=", "to=", []),
        (f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}Sunny < \n", "Sunny < \n", []),
        (f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{TO_WEATHER}<|call|>", "", [WEATHER]),
        (f"{TO_WEATHER}<|call|>{FINAL}So.<|return|>", "So.", [WEATHER]),
        (" to=functions.now<|channel|>commentary json<|message|>{}", "", [NOW]),
        ("<|channel|>commentary to=weather code<|message|>{}<|end|>", "", [("weather", {})]),
        ("<|channel|>commentary to=functions.now<|message|> <|call|>", "", [NOW]),
        ("<|channel|>commentary<|message|>First,<|end|>" + FINAL + " then", "First, then", []),
        ("<|channel|>commentary to=python<|message|>1+1<|call|>", "1+1", []),
        (f"{FINAL}No <|channel|> here", "No <|channel|> here", []),
        (f"{FINAL}Cut.<|end|><|start|>assistant<|channel|>fin", "Cut.", []),
        ("to=functions.f\n<|channel|>x", "to=functions.f\n<|channel|>x", []),
    ],
    "hermes": [
        ("Just text.", "Just text.", []),
        (f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>", "Let me see.\n", [WEATHER]),
        (f"<tool_call>{TURNED}</tool_call>\n<tool_call>{SIMPLE}</tool_call>\n", "", [WEATHER, NOW]),
        (f"<tool_call>{QUOTED}</tool_call>", "", [WEATHER]),
        (f"<tool_call>{ONE}", "", [WEATHER]),
        (f"<tool_call>{BOTH}</tool_call>", "", [WEATHER]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
        ('<tool_call>{"arguments": "", "name": "now"}</tool_call>', "", [NOW]),
        ('<tool_call>[{"name": "now"}, {"name": "now", "name": "f"}]</tool_call>', "", [NOW, NOW]),
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
        (
            '<tool_call>{"name":"f","arguments":{"t":"say </tool_call> now"}}</tool_call> So.',
            " So.",
            [("f", {"t": "say </tool_call> now"})],
        ),
        ('<tool_call>"no</tool_call> hm', '<tool_call>"no</tool_call> hm', []),
    ],
    "kimi_k2": [
        ("Just text.", "Just text.", []),
        (f"So:{KIMI}{KIMI_CALL}{KIMI_NOW}{KIMI_END}\nDone.", "So:\nDone.", [WEATHER, NOW]),
        (f"{KIMI_CALL}{KIMI_NOW}", "", [WEATHER, NOW]),
        (f"{KIMI}{KIMI_CALL[:-9]}", "", [WEATHER]),
        (KIMI_NOW.replace("functions.now:1", "now"), "", [NOW]),
        (KIMI_NOW.replace("now", "a.b"), "", [("a.b", {})]),
        (f"{KIMI}no{KIMI_END}", f"{KIMI}no{KIMI_END}", []),
        (
            "<|tool_call_begin|>a b<|tool_call_argument_begin|>{}",
            "<|tool_call_begin|>a b<|tool_call_argument_begin|>{}",
            [],
        ),
        ("<|tool_call", "<|tool_call", []),
    ],
    "llama3": [
        ("Just text.", "Just text.", []),
        (ONE, "", [WEATHER]),
        (f"<|python_tag|>{ONE}; {SIMPLE}", "", [WEATHER, NOW]),
        (f"{ONE}\n; {SIMPLE} \n", "", [WEATHER, NOW]),
        (f"\n{QUOTED}", "", [WEATHER]),
        ('{"a": 1}', '{"a": 1}', []),
        ('{"a": 1', '{"a": 1', []),
        ("<|python", "<|python", []),
        ("{ not json", "{ not json", []),
    ],
    "minimax_m2": [
        ("Just text.", "Just text.", []),
        (f"See:{INVOKED}\nDone.", "See:\nDone.", [WEATHER, NOW]),
        (f"<minimax:tool_call>\n{INVOKE}", "", [WEATHER]),
        ('<invoke name="now"></invoke>', "", [NOW]),
        ("<minimax:tool_call>\n</minimax:tool_call> hm", "<minimax:tool_call>\n</minimax:tool_call> hm", []),
        ("<minimax:tool_call> no", "<minimax:tool_call> no", []),
        ('<invoke name="', '<invoke name="', []),
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
    "qwen3_coder": [
        ("Just text.", "Just text.", []),
        (f"See.\n<tool_call>\n{CODER}\n</tool_call>\n{CODER_NOW}\nDone.", "See.\n\nDone.", [WEATHER, NOW]),
        (f"See. {CODER}\n</tool_call>", "See. ", [WEATHER]),
        ("<tool_call>\n<function=now>\n</tool_call>\n" + CODER_NOW, "", [NOW, NOW]),
        (f"<function=now><function=weather></function> {CODER_NOW}", "", [NOW, ("weather", {}), NOW]),
        ("<tool_call>\nno\n</tool_call>", "<tool_call>\nno\n</tool_call>", []),
        ("<tool_call><tool_call>", "<tool_call><tool_call>", []),
        ("a <function=b c> d", "a <function=b c> d", []),
        ("<function=now", "<function=now", []),
        (
            "<function=weather><parameter=x>seven</parameter><parameter=city>\n\n</parameter></function>",
            "",
            [("weather", {"x": "seven", "city": ""})],
        ),
    ],
    "seed_oss": [
        ("Just text.", "Just text.", []),
        (f"See.{SEED}{SEED_NOW}\nDone.", "See.\nDone.", [WEATHER, NOW]),
        (f"See. {SEED[17:]}", "See. ", [WEATHER]),
        ("<seed:tool_call>\nno\n</seed:tool_call>", "<seed:tool_call>\nno\n</seed:tool_call>", []),
        ("<function=now", "<function=now", []),
    ],
}
FLAT = [(name, *case) for name, cases in CASES.items() for case in cases]


def read(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    parser = tool_parsers.load(name).make(CONTEXT)
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
MARKUP = [
    *(
        mark
        for name in ("deepseek_v3", "glm45", "harmony", "kimi_k2", "minimax_m2", "qwen3_coder", "seed_oss")
        for mark in tool_parsers.load(name).MARKS
    ),
    *("to=functions.f", "assistant", "function", "f>", '"f">', "\n"),
]
MARKED = st.lists(
    st.sampled_from(["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", *MARKUP, *PIECES]),
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
    if not whole[2] and name not in ("mistral", "harmony"):
        assert whole[0] == text.removeprefix("<|python_tag|>" if name == "llama3" else "")


def test_arguments_stream_as_they_are_written() -> None:
    parser = tool_parsers.load("hermes").make()
    parser.push('<tool_call>{"name": "weather", "arguments": {"city": "Zü')
    assert parser.push("rich") == [ArgumentsEvent(0, "rich")]


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "qwen3_coder", "seed_oss"])
def test_text_arguments_stream_as_they_are_written_and_others_once_they_are_whole(name) -> None:
    text = next(text for text, _, calls in CASES[name] if calls and calls[0] is WEATHER)
    begin = text.index('Zürich "')
    parser = tool_parsers.load(name).make(CONTEXT)
    parser.push(text[:begin])
    assert parser.push('Zürich "') == [ArgumentsEvent(0, '{"city": "Zürich \\"')]
    numbers = text.index("[1")
    parser.push(text[begin + 8 : numbers])
    assert parser.push("[1, ") == []
    rest = [event for event in parser.push(text[numbers + 4 :]) if isinstance(event, ArgumentsEvent)]
    assert rest[0] == ArgumentsEvent(0, ', "days": [1, {"a": "}"}]')
    assert parser.closed


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, "5", 5),
        ({"enum": ["a", "1"]}, "1", "1"),
        ({"enum": ["a", 1]}, "1", 1),
        ({"$ref": "#/$defs/loop"}, "[1]", [1]),
        ({"$ref": "#/$defs/tree"}, "[1]", [1]),
        ({"$ref": "#/$defs/none"}, '"q"', '"q"'),
        ({"type": "object"}, '{"a": ', '{"a": '),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({}, "{}", {}),
        (True, "text", "text"),
        ({"type": 7}, "x", "x"),
    ],
)
def test_bare_text_becomes_what_its_schema_allows(schema, text, value) -> None:
    tree = {"anyOf": [{"$ref": "#/$defs/tree"}] * 9 + [{"type": "array"}]}
    defs = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "tree": tree}
    root = {"properties": {"a": schema}, "$defs": defs}
    parser = tool_parsers.load("glm45").make(ParserContext({"f": root}))
    call = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    told = "".join(event.text for event in parser.push(call) if isinstance(event, ArgumentsEvent))
    assert json.loads(told) == {"a": value}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("… <tool_call> …", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("", "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("<think> {%- set toolcall_begin_token = '<minimax:tool_call>' -%} <invoke name=", "minimax_m2"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name']", "deepseek_v3"),
        ("<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "seed_oss"),
        ("<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}", "kimi_k2"),
        ('{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking', "harmony"),
    ],
)
def test_the_parser_is_found_by_what_the_chat_template_mentions(template: str, name: str) -> None:
    assert tool_parsers.load("auto", template).__name__.endswith(name)


def test_the_settings_list_every_parser() -> None:
    for field, parsers in (("tool_parser", tool_parsers), ("reasoning_parser", reasoning_parsers)):
        told = (RouterConfig.model_fields[field].description or "").partition(": ")[2].split(", ")
        assert sorted(told) == sorted(
            {*parsers.names(), "auto", *(["none"] if parsers is reasoning_parsers else [])}
        )


def test_an_unknown_parser_lists_the_choices() -> None:
    with pytest.raises(
        ConfigError, match="deepseek_v3, glm45, harmony, hermes, kimi_k2, llama3, minimax_m2, mistral"
    ):
        tool_parsers.load("xml")
    with pytest.raises(ConfigError, match="auto, none, harmony, think"):
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
