"""Kimi K2: within ``<|tool_calls_section_begin|>`` each call between ``<|tool_call_begin|>`` and
``<|tool_call_end|>``, as ``functions.NAME:INDEX<|tool_call_argument_begin|>{…}``.

Source: https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
"""

from __future__ import annotations

import json

from baton.router.text.call_parts.sectioned_calls import CallMarks, SectionedCalls
from baton.router.text.lazy_calls import CallSyntax, json_of
from baton.router.text.tool_parsers import ParserContext, ToolParser

FORMAT = CallMarks(
    section="<|tool_calls_section_begin|>",
    begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    section_end="<|tool_calls_section_end|>",
)
MARKS = FORMAT.all
SIGNS = (FORMAT.section,)
ARGUMENTS = "arguments"
_SPACE = "functions."


def _name_of(head: str, behind: str) -> str:
    name = head.removeprefix(_SPACE)
    before, colon, number = name.rpartition(":")
    return before if colon and number.strip().isdecimal() else name


def lazy_rules(name: str, before: str, syntax: CallSyntax) -> str:
    """Returns the rules of an answer in which a call follows each ``begin`` (``lazy_calls.LazyRules``)."""
    separator, end = syntax.mark(FORMAT.separator), syntax.mark(FORMAT.end)
    tools = "".join(
        f"{name}_tool_{at}: {json.dumps(f'{_SPACE}{tool}:')} /[0-9]{{1,3}}/ {separator} {name}_of_{at} {end}\n"
        f"{name}_of_{at}: {json_of(arguments)}\n"
        for at, (tool, arguments) in enumerate(syntax.tools)
    )
    any_tool = "(" + " | ".join(f"{name}_tool_{at}" for at in range(len(syntax.tools))) + ")"
    free = syntax.free(name, before, FORMAT.begin)
    if syntax.special(FORMAT.section) is None:
        return f"{name}: {name}_call* {name}_free\n{name}_call: {name}_open {any_tool}\n{tools}{free}"
    each = f"(SPACE? {syntax.mark(FORMAT.begin)} {any_tool})+"
    calls = f"{syntax.mark(FORMAT.section)} {each} SPACE? {syntax.mark(FORMAT.section_end)}"
    return f"{name}: ({name}_free {name}_calls)* {name}_free\n{name}_calls: {calls}\n{tools}{free}"


def make(context: ParserContext = ParserContext()) -> ToolParser:
    """Returns a parser for one answer."""
    return SectionedCalls(FORMAT, _name_of)
