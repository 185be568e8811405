"""Writes grammars that leave an answer's text free and begin to bind where the model opens a tool call.

Knows nothing of requests or models. Every format of calls defines ``lazy_rules`` (``tool_parsers``). A rule marked
``lazy`` ends at the first place where it can, and ``<[N]>`` is token N, as llguidance has it:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

import msgspec

from baton.protos.json import Json
from baton.protos.nouns import JSON_OPTIONS


class UnboundSchema(Exception):
    """Says that no grammar can hold a format's calls to the schema of tool number ``tool``, and why."""

    def __init__(self, tool: int, why: str) -> None:
        super().__init__(why)
        self.tool = tool


class CallSyntax(msgspec.Struct, frozen=True):
    """Holds what a format's rules are made of: the tools that may be called, as (name, JSON schema of the
    arguments), and ``special``, which returns the id of the special token that a mark is, None if it is text.
    ``opened`` says that the prompt ends within a message, where a format has messages.
    """

    tools: Sequence[tuple[str, Json]]
    special: Callable[[str], int | None] = lambda mark: None
    opened: bool = False

    def mark(self, mark: str) -> str:
        """Returns the Lark expression of ``mark``."""
        number = self.special(mark)
        return json.dumps(mark) if number is None else f"<[{number}]>"

    def free(self, name: str, before: str, mark: str) -> str:
        """Returns the rules ``{name}_open``, text of terminal ``before`` up to and with the first ``mark``, and
        ``{name}_free``, text of it without ``mark``.
        """
        free = name.upper() + "_FREE"
        rules = f"{name}_free: {free}\n{free}: {before} & ~/(.|\\n)*{escaped(mark)}(.|\\n)*/\n"
        if self.special(mark) is None:
            return f"{rules}{name}_open[lazy]: {before} {json.dumps(mark)}\n"
        return f"{rules}{name}_open: {free} {self.mark(mark)}\n"


# Returns rules in Lark: the first argument names the rule of a whole answer, the second the terminal that may stand
# before a call. They refer to ``call``, ``TEXT`` and ``SPACE``, which ``lazy_grammar`` defines.
LazyRules = Callable[[str, str, CallSyntax], str]
_TERMINALS = r"""TEXT: /(.|\n)*/
SPACE: /[ \t\r\n]{1,8}/
"""


def lazy_grammar(
    rules: LazyRules,
    call: Json,
    syntax: CallSyntax,
    thought: tuple[str, str] | None = None,
    opened: bool = False,
) -> str:
    """Returns the Lark grammar of answers whose calls, wherever the format opens one, match JSON schema ``call``.

    ``thought`` gives the marks of a thought before the answer, in which nothing binds; ``opened`` says that the
    prompt has opened it.
    """
    return f"{_start(rules, syntax, thought, opened)}{_TERMINALS}call: {json_of(call)}\n"


def json_of(schema: Json) -> str:
    """Returns the Lark expression of JSON that matches ``schema``."""
    return "%json " + json.dumps({"x-guidance": JSON_OPTIONS, **schema}, ensure_ascii=False)


def escaped(mark: str) -> str:
    """Returns the regular expression, as it stands between slashes, of the text ``mark``."""
    return re.escape(mark).replace("/", r"\/")


def _start(rules: LazyRules, syntax: CallSyntax, thought: tuple[str, str] | None, opened: bool) -> str:
    if thought is None:
        return "start: answer\n" + rules("answer", "TEXT", syntax)
    begin, end = map(syntax.mark, thought)
    whole = syntax.special(thought[0]), syntax.special(thought[1])
    lazy = "[lazy]" if whole == (None, None) else ""
    if opened:
        return f"start: thought answer | TEXT\nthought{lazy}: TEXT {end}\n" + rules("answer", "TEXT", syntax)
    blank = "/\\s*/" if lazy else "SPACE?"
    return (
        f"start: thought answer | plain\nthought{lazy}: {blank} {begin} TEXT {end}\n"
        f"PLAIN: TEXT & ~/\\s*{escaped(thought[0])}(.|\\n)*/\n"
        + rules("answer", "TEXT", syntax)
        + rules("plain", "PLAIN", syntax)
    )
