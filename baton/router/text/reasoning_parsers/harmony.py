"""OpenAI's Harmony (gpt-oss): messages of channel ``analysis`` are reasoning, and they take turns with calls.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

from baton.router.text.tool_parsers import harmony

MARKS = harmony.SIGNS
JOINED = "harmony"  # the format of calls whose parser tells thoughts apart
