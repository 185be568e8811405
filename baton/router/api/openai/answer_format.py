"""Choice of how a chat answer is read, and of the grammar that binds the calls of strict tools in it.

Knows nothing of workers, nor of any one format (``tool_parsers``, ``reasoning_parsers``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

from baton.protos.errors import InvalidRequest
from baton.protos.nouns import Grammar
from baton.router.answer.service import GenerationService
from baton.router.api.openai.schema_text import refusal_of
from baton.router.api.openai.schemas import ChatBody
from baton.router.api.openai.tool_schema import call_schema
from baton.router.text import reasoning_parsers, tool_parsers
from baton.router.text.chat_reader import AnswerFormat
from baton.router.text.lazy_calls import CallSyntax, UnboundSchema, lazy_grammar
from baton.router.text.model import TextModel
from baton.router.text.tool_parsers import ParserContext, ToolParser


def answer_format(service: GenerationService, text: TextModel, body: ChatBody, rendered: str) -> AnswerFormat:
    """Returns how the answer is read; special tokens of its marks must stay in the text for that."""
    tools, reasoning = _formats(service, text, body)
    if body.grammar():
        reasoning = None
    marks = [*(tools.MARKS if tools else ()), *(reasoning.MARKS if reasoning else ())]
    make_tools: Callable[[], ToolParser] | None = None
    if tools is not None:
        make_tools = partial(tools.make, _context(service, body, rendered))
    if body.forced_grammar() is not None:
        make_tools = body.forced_parser
    return AnswerFormat(
        tools=make_tools,
        reasoning=partial(reasoning.make, _thinking(body, rendered, reasoning)) if reasoning else None,
        call_id=partial(_call_id, service),
        parallel=body.parallel_tool_calls is not False,
        shows_reasoning=body.include_reasoning is not False,
        marks=tuple(marks),
    )


def strict_calls(
    service: GenerationService, text: TextModel, body: ChatBody, rendered: str, field: str
) -> Grammar | None:
    """Returns the grammar that binds the calls of strict tools and leaves other text free; None if there are none,
    or if the answer is bound or its tokens are restricted already.

    Raises InvalidRequest, naming a tool's ``field``, for a schema to which the format of calls can't be held.
    """
    if not body.offered_tools or body.grammar() is not None or body.allowed_token_ids is not None:
        return None
    tools, reasoning = _formats(service, text, body)
    offered = body.strict_tools()
    if not offered:
        return None
    assert tools is not None
    refusal = refusal_of([schema for _, schema in offered])
    if refusal:
        return Grammar("grammar", refusal)
    opened = _thinking(body, rendered, reasoning) if reasoning else bool(body.continue_final_message)
    syntax = CallSyntax(offered, text.special_id, opened)
    thought = (reasoning.BEGIN, reasoning.END) if reasoning else None
    try:
        call = call_schema(offered, tools.ARGUMENTS)
        return Grammar("grammar", lazy_grammar(tools.lazy_rules, call, syntax, thought, opened))
    except UnboundSchema as error:
        param = f"tools[{error.tool}].{field}"
        raise InvalidRequest(
            f"{param}: {error}: leave strict out, or demand the call by tool_choice", param
        ) from None


def _formats(
    service: GenerationService, text: TextModel, body: ChatBody
) -> tuple[ModuleType | None, ModuleType | None]:
    """Returns the formats of calls and of thoughts, each None without; the first may tell thoughts apart, too."""
    names, source = service.parsers, text.template_source
    reasoning = reasoning_parsers.load(names.reasoning, source)
    tools = tool_parsers.load(names.tools, source) if body.offered_tools else None
    if reasoning is not None and reasoning_parsers.joined(reasoning):
        return (None if body.grammar() and tools is None else tool_parsers.load(reasoning.JOINED)), None
    return tools, None if tools is not None and tool_parsers.reads_thoughts(tools) else reasoning


def _context(service: GenerationService, body: ChatBody, rendered: str) -> ParserContext:
    tools = body.tools if body.offered_tools else None
    return ParserContext(
        schemas={tool.function.name: tool.function.parameters or {} for tool in tools or ()},
        prompt=rendered,
        reads_calls=bool(tools),
        splits_thoughts=service.parsers.reasoning != reasoning_parsers.NONE,
    )


def _thinking(body: ChatBody, rendered: str, reasoning: ModuleType) -> bool:
    """Returns whether the answer begins inside a thought: one that the template opened, or that the client left
    open.
    """
    if not body.continue_final_message:
        return rendered.rstrip().endswith(reasoning.BEGIN)
    said = body.messages[-1].content or ""
    return said.rfind(reasoning.BEGIN) > said.rfind(reasoning.END)


def _call_id(service: GenerationService) -> str:
    """Nine letters and digits, the most that some chat templates take."""
    return service.environment.new_id()[:9]
