"""Computes how many tokens of one sequence fit into a pool of pages.

Knows nothing of pools or of what else is in them.
"""

from __future__ import annotations

from itertools import accumulate

from baton.kv.layout.page import sliding_window
from baton.kv.layout.selection import selection_of
from baton.kv.layout.state import state_pages
from baton.protos.nouns import KvLayout

LEAST_SLIDE = 4  # least blocks of a table that are given back at once, as in kv/pages/lease.py
CHUNK_TOKENS = 512  # prompt tokens of a step, unless worker.prefill_chunk_tokens says otherwise
WORKING_STATES = 2  # recurrent states of a sequence that need pages: the one a step reads and the one it writes


def window_room(layout: KvLayout, chunk_tokens: int) -> tuple[int, ...]:
    """Returns the most pages that a sequence has at once in each page table of layers with a window, while it is
    read in chunks of ``chunk_tokens`` tokens and what no later token sees is given back after each.
    """
    size = layout.block_tokens
    return tuple([-(-(window - 1 + chunk_tokens) // size) + LEAST_SLIDE for window in layout.windows[1:]])


def reading_room(layout: KvLayout, chunk_tokens: int) -> tuple[int, ...]:
    """Returns ``window_room``, or that of the one page table if all layers see a window and nothing before it.

    Returns () if pages aren't given back while a prompt is read.
    """
    if (window := sliding_window(layout)) and selection_of(layout) is None:
        return (-(-(window - 1 + chunk_tokens) // layout.block_tokens) + LEAST_SLIDE,)
    return window_room(layout, chunk_tokens)


def window_bytes(layout: KvLayout, tokens: int) -> int:
    """Returns about how many bytes the further pages have that the next token after ``tokens`` tokens sees."""
    return sum(min(window, tokens) for window in layout.windows[1:]) * layout.page_bytes // layout.block_tokens


def prompt_pages(layout: KvLayout, blocks: int, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Returns the most pages that a prompt of ``blocks`` blocks has at once, those of recurrent states included."""
    windowed = sum(min(blocks, most) for most in window_room(layout, chunk_tokens))
    return blocks + windowed + WORKING_STATES * state_pages(layout)


def prompt_room(layout: KvLayout, pages: int) -> int:
    """Returns the most tokens of a prompt whose KV and recurrent states fit into ``pages`` pages, if it is read in
    chunks of ``CHUNK_TOKENS`` tokens.
    """
    left = max(0, pages - WORKING_STATES * state_pages(layout))
    most = sorted(window_room(layout, CHUNK_TOKENS))
    full = accumulate(most, initial=0)  # of so many tables as have all the pages that they ever have
    found = [(left - taken) // (1 + len(most) - count) for count, taken in enumerate(full)]
    return max(found) * layout.block_tokens


def context_room(layout: KvLayout, pages: int, most: int) -> int:
    """Returns the most tokens, up to ``most``, that a prompt and its answer may have together in ``pages`` pages.

    If every layer has a window, an answer frees the pages behind it, so its length is bounded by ``most`` alone.
    """
    return most if sliding_window(layout) else min(most, prompt_room(layout, pages))
