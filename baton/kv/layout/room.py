"""Computes how many tokens of one sequence fit into a pool of pages.

Knows nothing of pools or of what else is in them.
"""

from __future__ import annotations

from baton.kv.layout.page import sliding_window
from baton.kv.layout.state import state_pages
from baton.kv.layout.tables import table_count
from baton.protos.nouns import KvLayout

WORKING_STATES = 2  # recurrent states of a sequence that need pages: the one a step reads and the one it writes


def prompt_room(layout: KvLayout, pages: int) -> int:
    """Returns the most tokens of a prompt whose KV and recurrent states fit into ``pages`` pages."""
    return max(0, pages - WORKING_STATES * state_pages(layout)) // table_count(layout) * layout.block_tokens


def context_room(layout: KvLayout, pages: int, most: int) -> int:
    """Returns the most tokens, up to ``most``, that a prompt and its answer may have together in ``pages`` pages.

    If every layer has a window, an answer frees the pages behind it, so its length is bounded by ``most`` alone.
    """
    return most if sliding_window(layout) else min(most, prompt_room(layout, pages))
