"""Finds the tool whose parameters make a call's grammar impossible, so that a refusal names the field.

Knows nothing of how tools are joined to one grammar (``tool_schema``, ``text.lazy_calls``): each is tried alone.
"""

from __future__ import annotations

from baton.protos.nouns import Grammar
from baton.router.answer.service import GenerationService
from baton.router.api.openai.schema_text import schema_text
from baton.router.api.openai.schemas import ChatBody
from baton.router.api.openai.tools import Function, NamedChoice

PARAMETERS = "function.parameters"  # the field of a tool, as the chat endpoint has it
MOST_TRIED = 16  # tools of one refused call: each takes a process of its own, for 2 s at most


async def refuse_parameters(service: GenerationService, body: ChatBody, tenant_salt: bytes, field: str) -> None:
    """Raises InvalidRequest for the first tool that binds the call and whose parameters, ``field`` in the client's
    words, are no JSON schema that an answer can follow; returns if each is one.
    """
    for at, tool in enumerate((body.tools or ())[:MOST_TRIED]):
        schema = tool.function.parameters
        if schema is not None and _binds(tool.function, body.tool_choice):
            grammar = Grammar("json_schema", schema_text(schema))
            await service.check_grammar(grammar, f"tools[{at}].{field}", tenant_salt)


def _binds(function: Function, choice: object) -> bool:
    """Returns whether a call's grammar holds the function's parameters."""
    if isinstance(choice, NamedChoice):
        return function.name == choice.function.name
    return bool(function.strict) or choice == "required"
