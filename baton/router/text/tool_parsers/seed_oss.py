"""Seed-OSS: ``<function=NAME>``, for each argument ``<parameter=KEY>`` with its bare text, ``</function>``, within
``<seed:tool_call>``.

Source: https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct/blob/main/chat_template.jinja
"""

from __future__ import annotations

from baton.router.text.call_parts.tagged_calls import Tags
from baton.router.text.call_parts.tagged_format import TaggedFormat

TAGS = Tags(
    call="<function=",
    named=">",
    key="<parameter=",
    keyed=">",
    value="",
    end="</parameter>",
    closed="</function>",
    section="<seed:tool_call>",
    section_end="</seed:tool_call>",
)
SIGNS = (TAGS.section,)
MARKS, FORMAT = TAGS.all, TaggedFormat(TAGS)
ARGUMENTS = "arguments"
lazy_rules, make = FORMAT.lazy_rules, FORMAT.make
