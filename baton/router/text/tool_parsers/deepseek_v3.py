"""DeepSeek-V3, R1 and V3.1: within ``<｜tool▁calls▁begin｜>`` each call between ``<｜tool▁call▁begin｜>`` and
``<｜tool▁call▁end｜>``. V3.1 writes ``NAME<｜tool▁sep｜>{…}`` there. The others write ``function``, the separator,
``NAME`` and the arguments in a block of Markdown.

Source: https://huggingface.co/deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1 (tokenizer_config.json)
"""

from __future__ import annotations

import json

from baton.router.text.call_parts.sectioned_calls import CallMarks, SectionedCalls
from baton.router.text.lazy_calls import CallSyntax, json_of
from baton.router.text.tool_parsers import ParserContext, ToolParser

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FORMAT = CallMarks(SECTION, BEGIN, SEPARATOR, END, SECTION_END)
MARKS = FORMAT.all
ARGUMENTS = "arguments"
_FENCE = "```"
_OPEN, _SHUT = f"\n{_FENCE}json\n", f"\n{_FENCE}"  # around arguments in a block of Markdown


def _name_of(head: str, behind: str) -> str:
    return behind.partition(_FENCE)[0].strip() or head


def lazy_rules(name: str, before: str, syntax: CallSyntax) -> str:
    """Returns the rules of an answer in which what follows each BEGIN is a call in one of the two forms
    (``lazy_calls.LazyRules``).
    """
    separator, end = syntax.mark(SEPARATOR), syntax.mark(END)
    tools = "".join(
        f"{name}_tool_{at}: ({json.dumps(tool)} {separator} {name}_of_{at}"
        f' | "function" {separator} {json.dumps(tool + _OPEN)} {name}_of_{at} {json.dumps(_SHUT)}) {end}\n'
        f"{name}_of_{at}: {json_of(arguments)}\n"
        for at, (tool, arguments) in enumerate(syntax.tools)
    )
    any_tool = "(" + " | ".join(f"{name}_tool_{at}" for at in range(len(syntax.tools))) + ")"
    free = syntax.free(name, before, BEGIN)
    if syntax.special(SECTION) is None:
        return f"{name}: {name}_call* {name}_free\n{name}_call: {name}_open {any_tool}\n{tools}{free}"
    calls = f"{syntax.mark(SECTION)} (SPACE? {syntax.mark(BEGIN)} {any_tool})+ SPACE? {syntax.mark(SECTION_END)}"
    return f"{name}: ({name}_free {name}_calls)* {name}_free\n{name}_calls: {calls}\n{tools}{free}"


def make(context: ParserContext = ParserContext()) -> ToolParser:
    """Returns a parser for one answer."""
    return SectionedCalls(FORMAT, _name_of)
