"""Halves of surrogate pairs in JSON text that a model wrote, which no UTF-8 text can hold.

Knows nothing of calls or answers. A model that stops within an escaped pair, or gets one wrong, writes valid JSON
whose value can't be sent (https://www.rfc-editor.org/rfc/rfc8259, 8.2).
"""

from __future__ import annotations

import re

# An escaped pair, half of one (the group), or any other escape, which is passed over.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u([dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


def whole_pairs(text: str) -> str:
    """Returns the JSON ``text`` with U+FFFD for each escape that is half of a surrogate pair."""
    if "\\ud" not in text and "\\uD" not in text:
        return text
    return _ESCAPE.sub(lambda found: "\\ufffd" if found[1] else found[0], text)
