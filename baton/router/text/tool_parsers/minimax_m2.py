"""MiniMax-M2: ``<invoke name="NAME">``, for each argument ``<parameter name="KEY">`` with its bare text,
``</invoke>``; all calls of an answer within ``<minimax:tool_call>``.

Source: https://huggingface.co/MiniMaxAI/MiniMax-M2/blob/main/chat_template.jinja
"""

from __future__ import annotations

from baton.router.text.call_parts.tagged_calls import Tags
from baton.router.text.call_parts.tagged_format import TaggedFormat

TAGS = Tags(
    call="<invoke name=",
    named=">",
    key="<parameter name=",
    keyed=">",
    value="",
    end="</parameter>",
    closed="</invoke>",
    section="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
)
SIGNS = (TAGS.section,)
MARKS, FORMAT = TAGS.all, TaggedFormat(TAGS)
ARGUMENTS = "arguments"
lazy_rules, make = FORMAT.lazy_rules, FORMAT.make
