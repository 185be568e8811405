"""How many tokens of one sequence a pool of pages holds.

Knows nothing of pools or of what else is in them.
"""

from __future__ import annotations

from baton.kv.layout.page import sliding_window
from baton.kv.layout.state import state_pages
from baton.protos.nouns import KvLayout

WORKING_STATES = 2  # recurrent states that a sequence must have pages for: what a step reads, what it writes


def prompt_room(layout: KvLayout, pages: int) -> int:
    """Returns the most tokens that a prompt may have which ``pages`` pages hold with its recurrent states."""
    return max(0, pages - WORKING_STATES * state_pages(layout)) * layout.block_tokens


def context_room(layout: KvLayout, pages: int, most: int) -> int:
    """Returns the most tokens, up to ``most``, that prompt and answer may have together.

    Where every layer has a window, an answer gives back the pages behind it, so its length is bounded by ``most``.
    """
    return most if sliding_window(layout) else min(most, prompt_room(layout, pages))
