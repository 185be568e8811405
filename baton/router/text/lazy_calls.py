"""Writes grammars that leave an answer's text free and begin to bind where the model opens a tool call.

Knows nothing of requests or models. A format of calls that can be bound so defines ``lazy_rules``
(``tool_parsers``). A rule marked ``lazy`` ends at the first place where it can, as llguidance has it:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from baton.protos.json import Json
from baton.protos.nouns import JSON_OPTIONS

# Returns rules in Lark: the first argument names the rule of a whole answer, the second the terminal that may stand
# before a call. They refer to ``call``, ``TEXT`` and ``SPACE``, which ``lazy_grammar`` defines.
LazyRules = Callable[[str, str], str]
_TERMINALS = r"""TEXT: /(.|\n)*/
SPACE: /[ \t\r\n]{1,8}/
"""


def lazy_grammar(rules: LazyRules, call: Json, thought: tuple[str, str] | None = None, opened: bool = False) -> str:
    """Returns the Lark grammar of answers whose calls, wherever the format opens one, match JSON schema ``call``.

    ``thought`` gives the marks of a thought before the answer, in which nothing binds; ``opened`` says that the
    prompt has opened it.
    """
    schema = json.dumps({"x-guidance": JSON_OPTIONS, **call}, ensure_ascii=False)
    return f"{_start(rules, thought, opened)}{_TERMINALS}call: %json {schema}\n"


def _start(rules: LazyRules, thought: tuple[str, str] | None, opened: bool) -> str:
    if thought is None:
        return "start: answer\n" + rules("answer", "TEXT")
    begin, end = map(json.dumps, thought)
    if opened:
        return f"start: thought answer | TEXT\nthought[lazy]: TEXT {end}\n" + rules("answer", "TEXT")
    mark = re.escape(thought[0]).replace("/", r"\/")
    return (
        f"start: thought answer | plain\nthought[lazy]: /\\s*/ {begin} TEXT {end}\n"
        f"PLAIN: TEXT & ~/\\s*{mark}(.|\\n)*/\n" + rules("answer", "TEXT") + rules("plain", "PLAIN")
    )
