"""Writes a client's JSON schema as text, unless it is too long or too deep for a grammar.

Knows nothing of grammars. A body may hold megabytes of schema: writing them takes the event loop a second, only for
the text to be refused by its length.
"""

from __future__ import annotations

import json

from baton.protos.nouns import MAX_GRAMMAR_BYTES

MOST_DEEP = 256  # llguidance reads 128
# Stand for any schema that is longer, or deeper: refused where all grammars are, by the field's own name.
TOO_LONG = " " * (MAX_GRAMMAR_BYTES + 1)
TOO_DEEP = '{"not":' * MOST_DEEP + "{}" + "}" * MOST_DEEP


def schema_text(schema: object) -> str:
    """Returns ``schema`` as JSON text; for one too long or too deep, TOO_LONG or TOO_DEEP, which the grammar check
    refuses.
    """
    return refusal_of(schema) or json.dumps(schema, ensure_ascii=False)


def refusal_of(schema: object) -> str:
    """Returns TOO_LONG or TOO_DEEP if ``schema`` is over MAX_GRAMMAR_BYTES or MOST_DEEP levels, else ""."""
    left, level = MAX_GRAMMAR_BYTES, [schema]
    for _ in range(MOST_DEEP):
        below: list[object] = []
        for node in level:
            left -= len(node) if isinstance(node, str | dict | list) else 1
            if left < 0:
                return TOO_LONG
            if isinstance(node, dict):
                below += node  # its keys
                below += node.values()
            elif isinstance(node, list):
                below += node
        if not below:
            return ""
        level = below
    return TOO_DEEP
