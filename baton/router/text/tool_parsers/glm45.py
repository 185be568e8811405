"""GLM-4.5 and later: ``<tool_call>NAME``, for each argument ``<arg_key>KEY</arg_key>`` and ``<arg_value>`` with its
bare text, ``</tool_call>``.

Source: https://huggingface.co/zai-org/GLM-4.5/blob/main/chat_template.jinja
"""

from __future__ import annotations

from baton.router.text.call_parts.tagged_calls import Tags
from baton.router.text.call_parts.tagged_format import TaggedFormat

TAGS = Tags(
    call="<tool_call>",
    named="",
    key="<arg_key>",
    keyed="</arg_key>",
    value="<arg_value>",
    end="</arg_value>",
    closed="</tool_call>",
)
SIGNS = (TAGS.key,)
MARKS, FORMAT = TAGS.all, TaggedFormat(TAGS)
ARGUMENTS = "arguments"
lazy_rules, make = FORMAT.lazy_rules, FORMAT.make
