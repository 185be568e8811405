"""Conversion of Anthropic's messages, whose content is a list of typed blocks, to chat messages.

Knows nothing of models, sampling or answers. https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from baton.protos.errors import InvalidRequest
from baton.protos.json import Json
from baton.router.api.openai.breakpoints import Marks, mark_of
from baton.router.api.openai.messages import THOUGHTS, of_current_turn

ROLES = ("user", "assistant", "system")
THINKING, REDACTED = "thinking", "redacted_thinking"  # types of blocks; the second is nobody's text
ERROR_MARK = "Error: "  # what the result of a tool that failed begins with, because templates have no field for it


def chat_messages(system: str | list[Json] | None, messages: list[Json]) -> list[Json]:
    """Returns a conversation as chat messages, the system's first.

    Text blocks of the system or of a user's message are joined by newlines; those of an assistant's message are
    joined as they are. A ``cache_control`` on a block is kept on its message, and so are thoughts of the current
    turn. Raises InvalidRequest naming the block at fault.
    """
    said: list[Json] = []
    if system:
        said.append(_message("system", _texts(system, "system"), "\n", _marks(system, "\n")))
    for at, message in enumerate(messages):
        said.extend(_converted(message, f"messages[{at}]"))
    return of_current_turn(said)


def _converted(message: Json, param: str) -> Iterator[Json]:
    """Yields the chat messages of one message."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"{param}.role is {role!r}: give user, assistant or system", f"{param}.role")
    if role == "system":
        yield _message("system", _texts(content, f"{param}.content"), "\n", _marks(content, "\n"))
    elif role == "assistant":
        yield _of_assistant(content, f"{param}.content")
    else:
        yield from _of_user(content, f"{param}.content")


def _of_user(content: object, param: str) -> Iterator[Json]:
    """Yields tool results and the text between them, in their order."""
    texts: list[str] = []
    marks, chars = Marks(), 0  # chars: of the texts joined
    for where, block in _blocks(content, param):
        if block["type"] == "tool_result":
            if texts:
                yield _message("user", texts, "\n", marks)
                texts, marks, chars = [], Marks(), 0
            yield _result(block, where)
        else:
            text = _text(block, where)
            chars += len("\n") * bool(texts) + len(text)
            texts.append(text)
            if _is_marked(block):
                marks.append(mark_of(block["cache_control"], chars))
    if texts:
        yield _message("user", texts, "\n", marks)


def _of_assistant(content: object, param: str) -> Json:
    texts: list[str] = []
    calls: list[Json] = []
    thoughts = ""
    for where, block in _blocks(content, param):
        if block["type"] == "tool_use":
            calls.append(_call(block, where))
        elif block["type"] == THINKING:
            thoughts += block[THINKING] if isinstance(block.get(THINKING), str) else ""
        elif block["type"] != REDACTED:
            texts.append(_text(block, where))
    said = _message("assistant", texts, "", _marks(content, ""))
    said |= {THOUGHTS: thoughts} if thoughts else {}
    return said | {"tool_calls": calls} if calls else said


def _result(block: Json, param: str) -> Json:
    text = "\n".join(_texts(block.get("content") or "", f"{param}.content"))
    if block.get("is_error"):
        text = ERROR_MARK + text
    said: Json = {"role": "tool", "tool_call_id": _string(block, "tool_use_id", param), "content": text}
    return said | {"cache_control": Marks([mark_of(block["cache_control"])])} if _is_marked(block) else said


def _call(block: Json, param: str) -> Json:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidRequest(f"{param}.input should be an object", f"{param}.input")
    called = {"name": _string(block, "name", param), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _string(block, "id", param), "type": "function", "function": called}


def _message(role: str, texts: list[str], between: str, marks: Marks) -> Json:
    said: Json = {"role": role, "content": between.join(texts)}
    return said | {"cache_control": marks} if marks else said


def _marks(content: object, between: str) -> Marks:
    """Returns the marks of blocks, each behind the characters up to its block's end."""
    found, chars, gap = Marks(), 0, 0  # gap: characters between the texts so far and the next one
    for block in content if isinstance(content, list) else ():
        if isinstance(block.get("text"), str) and block["type"] == "text":
            chars, gap = chars + gap + len(block["text"]), len(between)
        if _is_marked(block):
            found.append(mark_of(block["cache_control"], chars))
    return found


def _is_marked(block: Json) -> bool:
    return block.get("cache_control") is not None  # clients send null for none


def _texts(content: object, param: str) -> list[str]:
    return [_text(block, where) for where, block in _blocks(content, param)]


def _blocks(content: object, param: str) -> Iterator[tuple[str, Json]]:
    """Yields each block with its path; a string is one text block."""
    if isinstance(content, str):
        yield param, {"type": "text", "text": content}
        return
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{param} should be a string or an array of one or more blocks", param)
    for at, block in enumerate(content):
        where = f"{param}[{at}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest(f'{where} should be an object with a "type"', where)
        yield where, block


def _text(block: Json, param: str) -> str:
    if block["type"] != "text" or not isinstance(block.get("text"), str):
        text = f'{param} should be {{"type": "text", "text": …}} here: this model reads text only'
        raise InvalidRequest(text, param)
    return str(block["text"])


def _string(block: Json, key: str, param: str) -> str:
    value = block.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}.{key} should be a string", f"{param}.{key}")
    return value
