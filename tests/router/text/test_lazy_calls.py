"""Grammars of answers with strict tools: text is free, and what a format opens as a call follows its schema."""

from __future__ import annotations

import json
import re

import pytest

from baton.protos.grammar import byte_tokenizer, compiled
from baton.protos.nouns import Grammar
from baton.router.answer.grammar_check import GrammarCheck
from baton.router.text.lazy_calls import CallSyntax, UnboundSchema, lazy_grammar
from baton.router.text.tool_events import ArgumentsEvent, CallEvent
from baton.router.text.tool_parsers import (
    deepseek_v3,
    glm45,
    harmony,
    hermes,
    kimi_k2,
    llama3,
    minimax_m2,
    mistral,
    qwen3_coder,
    seed_oss,
)

POINT = {
    "type": "object",
    "properties": {"at": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}
THOUGHT = ("<think>", "</think>")
GOOD = '{"name": "f", "%s": {"at": 3}}'
BAD = '{"name": "f", "%s": {"at": "x'


def call(key: str) -> dict[str, object]:
    properties = {"name": {"const": "f"}, key: POINT}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}


def taken(form, text: str, thought=None, opened: bool = False) -> tuple[str, bool]:
    """Returns as much of ``text`` as the grammar allows, and whether the answer may end there."""
    tokenizer = byte_tokenizer()
    spec = lazy_grammar(form.lazy_rules, call(form.ARGUMENTS), CallSyntax([("f", POINT)]), thought, opened)
    matcher, data = compiled(Grammar("grammar", spec), tokenizer), text.encode()
    for at, byte in enumerate(data):
        if not matcher.compute_bitmask()[byte // 8] >> (byte % 8) & 1:
            return data[:at].decode(), False
        assert matcher.consume_token(byte)
    return text, bool(matcher.compute_bitmask()[256 // 8] & 1)


def hermes_call(body: str) -> str:
    return f"<tool_call>\n{body % 'arguments'}\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        "", "It is < 3 and </tool_call> {\n", hermes_call(GOOD), f"Let me see.{hermes_call(GOOD)}",
        f"{hermes_call(GOOD)}\n{hermes_call(GOOD)} done",
    ],
)  # fmt: skip
@pytest.mark.parametrize("thought", [None, THOUGHT])
def test_hermes_text_is_free_and_whole_calls_may_end(text: str, thought: tuple[str, str] | None) -> None:
    assert taken(hermes, text, thought) == (text, True)


@pytest.mark.parametrize("before", ["", "Let me see.", hermes_call(GOOD)])
def test_hermes_calls_that_do_not_fit_are_stopped_where_they_leave_the_schema(before: str) -> None:
    text = f"{before}<tool_call>\n{BAD % 'arguments'}"
    assert taken(hermes, text) == (text[:-2], False)
    other = f'{before}<tool_call>{{"name": "g'
    assert taken(hermes, other) == (other[:-1], False)
    assert taken(hermes, f"{before}<tool_call>") == (f"{before}<tool_call>", False)


def test_nothing_binds_in_a_thought_and_calls_bind_behind_it() -> None:
    thought, good, bad = "I could <tool_call> x", hermes_call(GOOD), f"<tool_call>{BAD % 'arguments'}"
    for begin, opened in (("", True), ("<think>", False), ("\n<think>", False)):
        text = f"{begin}{thought}</think>\n"
        assert taken(hermes, text + good, THOUGHT, opened) == (text + good, True)
        assert taken(hermes, text + bad, THOUGHT, opened) == ((text + bad)[:-2], False)


def test_llama3_answers_are_text_or_calls() -> None:
    good, bad = GOOD % "parameters", BAD % "parameters"
    for text in ("", "It is {", f"See {bad}", good, f"{good}; {good}", f"\n{good}", f"{llama3.TAG}{good}"):
        assert taken(llama3, text) == (text, True), text
    for text in (bad, f"{good};{bad}", f"{llama3.TAG}{bad}"):
        assert taken(llama3, text) == (text[:-2], False), text
    assert taken(llama3, f"<think>{{</think>{good}", THOUGHT) == (f"<think>{{</think>{good}", True)
    assert taken(llama3, f"<think>{{</think>{bad}", THOUGHT) == (f"<think>{{</think>{bad}"[:-2], False)


@pytest.mark.parametrize("form", [hermes, llama3])
def test_what_the_grammar_takes_as_a_call_its_parser_reads(form) -> None:
    body = GOOD % form.ARGUMENTS
    text = hermes_call(GOOD) if form is hermes else body
    assert taken(form, text) == (text, True)
    parser = form.make()
    events = parser.push(text) + parser.flush()
    assert json.loads("".join(e.text for e in events if isinstance(e, ArgumentsEvent))) == {"at": 3}


ARGUMENTS = '{"at": 3}'
NAMED = f"[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{ARGUMENTS}"


@pytest.mark.parametrize("before", ["", "Let me see: "])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("", 0),
        (f"See {BAD % 'arguments'}", 0),
        (f"[TOOL_CALLS][{GOOD % 'arguments'}]", 1),
        (f"[TOOL_CALLS] [{GOOD % 'arguments'}, {GOOD % 'arguments'}]\n", 2),
        (f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}", 1),
        (f"{NAMED}[TOOL_CALLS]f{ARGUMENTS}", 2),
    ],
)
def test_mistral_answers_are_text_and_calls_in_either_form(before: str, text: str, calls: int) -> None:
    assert taken(mistral, before + text) == (before + text, True)
    parser = mistral.make()
    events = parser.push(before + text) + parser.flush()
    assert sum(isinstance(event, CallEvent) for event in events) == calls


@pytest.mark.parametrize("before", ["", "Let me see: "])
def test_mistral_calls_that_do_not_fit_are_stopped_where_they_leave_the_schema(before: str) -> None:
    bad = BAD % "arguments"
    for text in (
        f"[TOOL_CALLS][{bad}",
        '[TOOL_CALLS]f[ARGS]{"at": "x',
        f"[TOOL_CALLS][{GOOD % 'arguments'}, {bad}",
    ):
        assert taken(mistral, before + text) == (before + text[:-2], False), text
    assert taken(mistral, f"{before}[TOOL_CALLS]g") == (f"{before}[TOOL_CALLS]", False)


CODER = "<tool_call>\n<function=f>\n<parameter=at>\n%s\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>at</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="at">%s</parameter>\n</invoke>\n</minimax:tool_call>'
)
DEEPSEEK = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"at": %s}<｜tool▁call▁end｜>'
DEEPSEEKS = f"<｜tool▁calls▁begin｜>{DEEPSEEK}<｜tool▁calls▁end｜>"
SEED = "<seed:tool_call>\n<function=f>\n<parameter=at>%s</parameter>\n</function>\n</seed:tool_call>"
KIMI = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"at": %s}<|tool_call_end|>'
KIMIS = f"<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>"
THEIRS = [
    (qwen3_coder, CODER),
    (glm45, GLM),
    (minimax_m2, MINIMAX),
    (deepseek_v3, DEEPSEEKS),
    (seed_oss, SEED),
    (kimi_k2, KIMIS),
]


@pytest.mark.parametrize("thought", [None, THOUGHT])
@pytest.mark.parametrize(("form", "body"), THEIRS)
def test_calls_between_tags_are_bound_amid_free_text(form, body, thought) -> None:
    for text in ("", "It is < 3.\n", body % 3, f"Let me see.\n{body % 3}\n{body % 42} done"):
        assert taken(form, text, thought) == (text, True)
    for bad in (body % "q", f"Hm. {body % 3}{body % 'q'}"):
        assert taken(form, bad, thought) == (bad[: bad.rindex("q")], False)
    other = body
    for named in ("f>", '"f"', "call>f", "begin｜>f", ".f:"):
        other = other.replace(named, named.replace("f", "g"))
    took, ended = taken(form, other % 3, thought)
    assert len(took) < len(other % 3)
    assert not ended


def strict(form, schema: dict, text: str) -> bool:
    """Returns whether the grammar takes ``text`` as a call of strict tool f."""
    spec = lazy_grammar(form.lazy_rules, call(form.ARGUMENTS), CallSyntax([("f", schema)]))
    return compiled(Grammar("grammar", spec), byte_tokenizer()).try_consume_tokens(list(text.encode())) == len(
        text.encode()
    )


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, "1 < 2 </param\n", None),
        ({"type": "string", "maxLength": 3}, "abc", "abcd"),
        ({"type": "string", "minLength": 2}, "ab", "a"),
        ({"type": "string", "pattern": "^a/b$"}, "a/b", "xa/b"),
        ({"type": "string", "pattern": "b"}, "abc", "ac"),
        ({"enum": ["C", "F", 3]}, "3", "K"),
        ({"const": "C"}, "C", "CC"),
        ({"type": "boolean"}, "true", "yes"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, "[1]", '["a"]'),
        ({"$ref": "#/$defs/n"}, "7", "x"),
        ({}, "any <thing>", None),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "ab", "abc"),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "null", "nul"),
        ({"anyOf": [{"enum": ["C", "a\nb"]}, {"type": "null"}], "default": None}, "a\nb", "K"),
        ({"anyOf": [{"type": "integer"}, {"const": "auto"}]}, "-12", "1.5"),
        ({"anyOf": [{"type": "integer"}, {"const": "auto"}]}, "auto", "manual"),
        ({"type": ["string", "integer"], "pattern": "^a"}, "12", "1a"),
        ({"anyOf": [{"type": "string", "pattern": "^a"}, {"anyOf": [{"$ref": "#/$defs/n"}]}]}, "7", "b"),
        ({"anyOf": [{"minLength": 3}, {"type": "null"}]}, "abc", "ab"),
        ({"oneOf": [{"type": "string", "maxLength": 1}, {"type": "boolean"}]}, "false", "no"),
        ({"type": "string", "enum": ["a", 1]}, "a", "1"),
        ({"enum": ["1", 2]}, "2", "1"),
        ({"type": "string", "pattern": r"^a\/b$"}, "a/b", "a-b"),
        ({"type": "string", "pattern": r"\d\$"}, "cost 3$ or so", "cost 3"),
        ({"type": "string", "pattern": "^a|b$"}, "ac", "ca"),
        ({"type": "string", "pattern": "^a|b$"}, "cb", "bc"),
        ({"type": "string", "pattern": "^(a|[|/)])$"}, "|", "a|"),
    ],
)
@pytest.mark.parametrize(("form", "body"), THEIRS[:3])
def test_bare_text_is_held_to_its_schema(form, body, schema, good, bad) -> None:
    tool = {"type": "object", "properties": {"at": schema}, "$defs": {"n": {"type": "integer"}}}
    assert strict(form, tool, body % good)
    assert bad is None or not strict(form, tool, body % bad)


def test_a_tool_that_is_not_strict_takes_any_arguments_and_a_required_one_is_not_left_out() -> None:
    for form, body in THEIRS[:3]:
        assert strict(form, {"type": "object"}, body % "any\nthing")
        tool = {"type": "object", "properties": {"no": {"type": "integer"}}, "required": ["at"]}
        assert strict(form, tool, body % "x")
        assert not strict(form, tool | {"required": ["no"]}, body % "x")


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": []}, "no object"),
        ({"required": "at"}, "no list of names"),
        ({"required": [3]}, "no list of names"),
        ({"properties": {"at": {"enum": 3}}}, "an enum of nothing"),
        ({"properties": {"at": {"enum": []}}}, "an enum of nothing"),
        ({"properties": {"at": {"type": "string", "minLength": "2"}}}, "no whole number"),
        ({"properties": {"at": {"type": "string", "maxLength": -1}}}, "no whole number"),
        ({"properties": {"at": {"type": "integer", "allOf": [{"$ref": "#/properties/b"}]}}}, "outside of"),
        ({"patternProperties": {}}, "'patternProperties'"),
        ({"properties": {"at": {"enum": ["a"], "pattern": "b"}}}, "'pattern'"),
        ({"properties": {"at": {"enum": [1], "type": "string"}}}, "its type allows"),
        ({"properties": {"at": {"anyOf": []}}}, "anyOf of nothing"),
        ({"properties": {"at": {"anyOf": [{"type": "string"}, {"const": 3}]}}}, "some values of another type"),
        ({"properties": {"at": {"anyOf": [{}, {"type": "number", "minimum": 3}]}}}, "some values of another type"),
        ({"properties": {"at": {"oneOf": [{"type": "string"}, {"const": "a"}]}}}, "may both match"),
        ({"properties": {"at": {"type": "string", "anyOf": [{"maxLength": 1}]}}}, "'type'"),
        ({"properties": {"at": {"$ref": "#/$defs/n", "minimum": 3}}, "$defs": {"n": {}}}, "'minimum'"),
        ({"properties": {"at": {"type": "string", "pattern": "a)|(b"}}}, "brackets"),
        ({"properties": {"at": False}}, "allows no value"),
    ],
)
def test_schemas_that_bare_text_cannot_be_held_to_say_why(schema: dict, why: str) -> None:
    for form, _ in THEIRS[:3]:
        with pytest.raises(UnboundSchema, match=why):
            form.lazy_rules("answer", "TEXT", CallSyntax([("f", {"type": "object"} | schema)]))


def test_schemas_that_grow_by_references_are_read_part_by_part() -> None:
    for name, most in (("anyOf", 17), ("anyOf", 4000), ("oneOf", 4000), ("allOf", 4000)):
        grown = {f"d{n}": {name: [{"$ref": f"#/$defs/d{n + 1}"}] * 9} for n in range(most)}
        tool = {"type": "object", "properties": {"at": {"$ref": "#/$defs/d0"}}, "$defs": grown}
        with pytest.raises(UnboundSchema, match=r"choices within|may both|'allOf'"):
            glm45.lazy_rules("answer", "TEXT", CallSyntax([("f", tool)]))


HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    "<|constrain|>json"
)
TURNED = " to=functions.f<|channel|>commentary json"


@pytest.mark.parametrize(
    ("opened", "text", "left"),
    [
        (False, f'{HARMONY}<|message|>{{"at": 3}}', 0),
        (False, f'{TURNED}<|message|>{{"at": 3}}', 0),
        (False, f'{HARMONY}<|message|>{{"at": "x', 2),
        (False, "<|channel|>final<|message|>Yes", 0),
        (False, "<|channel|>commentary to=functions.g", 1),
        (False, "Yes", 3),
        (True, "more", 0),
        (True, f'more<|end|><|start|>assistant{TURNED}<|message|>{{"at": 3}}', 0),
    ],
)
def test_harmonys_calls_are_bound_by_special_tokens(opened: bool, text: str, left: int) -> None:
    spec = lazy_grammar(harmony.lazy_rules, call("arguments"), CallSyntax([("f", POINT)], SPECIAL.get, opened))
    matcher, ids = compiled(Grammar("grammar", spec), byte_tokenizer(400)), ids_of(text)
    assert matcher.try_consume_tokens(ids) == len(ids) - left
    assert matcher.is_accepting() == (not left)


def test_harmonys_marks_as_text_bind_nothing_and_that_is_said() -> None:
    with pytest.raises(UnboundSchema, match="special tokens"):
        harmony.lazy_rules("answer", "TEXT", CallSyntax([("f", POINT)]))


MARKS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", *deepseek_v3.MARKS, *kimi_k2.MARKS),
    *("<seed:tool_call>", "</seed:tool_call>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
SPECIAL = {mark: 300 + at for at, mark in enumerate(MARKS)}
MARK = re.compile("|".join(map(re.escape, SPECIAL)))


def ids_of(text: str) -> list[int]:
    """Returns the bytes of ``text``, its marks as special tokens."""
    ids, at = list[int](), 0
    for mark in MARK.finditer(text):
        ids += [*text[at : mark.start()].encode(), SPECIAL[mark[0]]]
        at = mark.end()
    return ids + list(text[at:].encode())


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (hermes, f"Let me see.{hermes_call(GOOD)}\n{hermes_call(GOOD)} done", f"x<tool_call>{BAD % 'arguments'}"),
        (llama3, f"<|python_tag|>{GOOD % 'parameters'}", f"<|python_tag|>{BAD % 'parameters'}"),
        (mistral, f"Hm.[TOOL_CALLS][{GOOD % 'arguments'}]", f"[TOOL_CALLS][{BAD % 'arguments'}"),
        (
            mistral,
            '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"at": 3}[TOOL_CALLS]f[ARGS]{"at": 4}',
            '[TOOL_CALLS]f[ARGS]{"at": "x',
        ),
        (deepseek_v3, f"Hm.{DEEPSEEKS % 3} done", f'{DEEPSEEKS.partition("%s")[0]}"x'),
        (kimi_k2, f"Hm.{KIMIS % 3} done", f'{KIMIS.partition("%s")[0]}"x'),
        (seed_oss, f"Hm.{SEED % 3} done", f"{SEED.partition('%s')[0]}xx"),
        (glm45, f"Hm.{GLM % 3} done", f"{GLM.partition('%s')[0]}xx"),
        (minimax_m2, f"Hm.{MINIMAX % 3} done", f"{MINIMAX.partition('%s')[0]}xx"),
        (qwen3_coder, f"Hm.{CODER % 3} done", f"{CODER.partition('%s')[0]}xx"),
    ],
)
def test_marks_that_are_special_tokens_open_calls_and_cannot_be_written_as_text(form, good: str, bad: str) -> None:
    spec = lazy_grammar(form.lazy_rules, call(form.ARGUMENTS), CallSyntax([("f", POINT)], SPECIAL.get))
    matcher = compiled(Grammar("grammar", spec), byte_tokenizer(400))
    whole = ids_of(good)
    assert matcher.try_consume_tokens(whole) == len(whole)
    assert matcher.is_accepting()
    matcher = compiled(Grammar("grammar", spec), byte_tokenizer(400))
    broken = ids_of(bad)
    assert matcher.try_consume_tokens(broken) == len(broken) - 2
    if form in (hermes, mistral):
        spelled = compiled(Grammar("grammar", spec), byte_tokenizer(400))
        mark = hermes.BEGIN if form is hermes else mistral.MARK
        assert spelled.try_consume_tokens(list(f"See {mark}".encode())) == len(f"See {mark}") - 1


async def test_a_grammar_with_special_tokens_passes_the_routers_check() -> None:
    spec = lazy_grammar(mistral.lazy_rules, call("arguments"), CallSyntax([("f", POINT)], SPECIAL.get))
    await GrammarCheck().check(Grammar("grammar", spec), "tools")
