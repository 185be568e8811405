"""Qwen3-Coder, Qwen3.5, Nemotron 3: ``<function=NAME>``, for each argument ``<parameter=KEY>`` with its bare text
between line breaks, ``</function>``; usually within ``<tool_call>``, which the models forget at times.

Source: https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct/blob/main/chat_template.jinja
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
    section="<tool_call>",
    section_end="</tool_call>",
    trims=True,
)
SIGNS = (TAGS.key,)
MARKS, FORMAT = TAGS.all, TaggedFormat(TAGS)
ARGUMENTS = "arguments"
lazy_rules, make = FORMAT.lazy_rules, FORMAT.make
