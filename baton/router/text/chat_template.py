"""Rendering of conversations as prompts, by the model's own Jinja chat template.

Knows nothing of tokens or requests. Semantics are Hugging Face's (transformers, ``apply_chat_template``):
sandboxed, blocks trimmed, ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, loop controls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.protos.errors import CheckpointError, InvalidRequest
from baton.protos.json import Json, JsonValue

ChatMessage = Mapping[str, JsonValue]
PLAIN = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
# Stands at the end of a message that is to be continued; whether its space is left says if the template trims.
OPEN_END = "CONTINUE-FROM-HERE "
DEFAULT, TOOL_USE = "default", "tool_use"  # a model's templates, by transformers' names
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is just its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """Renders one compiled chat template; ``names`` are the variables that it reads.

    ``special_tokens`` maps names such as "bos_token" to their text. ``with_tools`` is the template of conversations
    that have tools, if the model has one of its own for them; ``names`` and ``source`` are then of both. Raises
    CheckpointError if a template doesn't compile.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, with_tools: str | None = None
    ) -> None:
        self._special = dict(special_tokens or {})
        self._template, self.names = _compiled(source)
        self._with_tools, more = (self._template, self.names) if with_tools is None else _compiled(with_tools)
        self.names |= more
        self.source = source if with_tools is None else f"{source}\n{with_tools}"

    def render(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        switches: Mapping[str, JsonValue] | None = None,
        tools: Sequence[Mapping[str, JsonValue]] | None = None,
        documents: Sequence[Mapping[str, JsonValue]] | None = None,
    ) -> str:
        """Returns the prompt's text; ``switches`` are variables of the template's own (enable_thinking, …).

        Raises InvalidRequest if the template refuses the conversation.
        """
        ours = {"messages": messages, "tools": tools, "documents": documents, **self._special}
        template = self._with_tools if tools else self._template
        try:
            return template.render({**(switches or {}), **ours}, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses this: {error}", "messages") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest(f"the model's chat template can't render this: {error}", "messages") from None

    def render_open(
        self,
        messages: Sequence[ChatMessage],
        switches: Mapping[str, JsonValue] | None = None,
        tools: Sequence[Mapping[str, JsonValue]] | None = None,
        documents: Sequence[Mapping[str, JsonValue]] | None = None,
    ) -> str:
        """Returns the prompt's text up to the end of the last message's content, for an answer that continues it.

        The other parameters are those of ``render``. Follows transformers' ``continue_final_message``.
        Raises InvalidRequest if the template drops part of the content.
        """
        content: str = messages[-1]["content"]
        opened = [*messages[:-1], {**messages[-1], "content": content + OPEN_END}]
        text = self.render(opened, False, switches, tools, documents)
        end = text.rfind(OPEN_END.strip())
        if end < 0 or content.strip() not in text:
            why = "the model's chat template leaves out (part of) the final message: it can't be continued"
            raise InvalidRequest(why, "continue_final_message")
        return text[:end] if text.startswith(OPEN_END, end) else text[:end].rstrip()


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """Returns the chat template of a model directory (chat_template.jinja, tokenizer_config.json or
    chat_template.json); None without one.

    Raises CheckpointError.
    """
    config = _read_json(directory / "tokenizer_config.json")
    sources = _sources(directory, config)
    if DEFAULT not in sources:
        return None
    special = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    return ChatTemplate(sources[DEFAULT], special, sources.get(TOOL_USE))


def _sources(directory: Path, config: Json) -> dict[str, str]:
    """Returns the model's templates by name; a model with one has ``DEFAULT`` alone."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return {DEFAULT: file.read_text(encoding="utf-8")} | _further(directory)
    found = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if not isinstance(found, list):
        return {DEFAULT: found} if isinstance(found, str) else {}
    try:
        return {entry["name"]: entry["template"] for entry in found}
    except (KeyError, TypeError):
        text = f"{directory}: a list of chat templates needs a name and a template in each entry"
        raise CheckpointError(text, "chat_template") from None


def _further(directory: Path) -> dict[str, str]:
    folder = directory / "additional_chat_templates"
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    values = {name: config.get(name) for name in _SPECIAL}
    texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_json(path: Path) -> Json:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}", "tokenizer") from None
    return found if isinstance(found, dict) else {}


def _compiled(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """Returns the template and the variables that it reads. Raises CheckpointError."""
    environment = _environment()
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(names)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the model's chat template doesn't compile: {error}", "chat_template") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_now: Callable[[str], str] = lambda form: datetime.now().strftime(form)  # noqa: E731


def _to_json(value: JsonValue, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
