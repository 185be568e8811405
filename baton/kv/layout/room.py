"""Converts between tokens of sequences and the pages and bytes that their KV takes, whatever the layout.

Knows nothing of pools or of what else is in them. A page isn't 16 tokens in general: it may hold more of them, a
block may have several pages, of which those of layers with a window are given back, and recurrent states take pages
too. Whoever needs tokens, pages or bytes of the other asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from baton.kv.layout.page import group_bytes, sliding_window, sunk_blocks
from baton.kv.layout.selection import selection_of
from baton.kv.layout.state import state_pages
from baton.protos.nouns import BLOCK_TOKENS, KvLayout

LEAST_SLIDE = 4  # least blocks of a table that are given back at once, as in kv/pages/lease.py
CHUNK_TOKENS = 512  # prompt tokens of a step, unless worker.prefill_chunk_tokens says otherwise
# Mean pages beside a window's own while an answer is written: one that the window has in part, and half of those
# that may be given back and aren't yet.
WRITTEN_BEHIND = 1 + (LEAST_SLIDE - 1) / 2
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
    return int(_blocks_in(layout, pages, window_room(layout, CHUNK_TOKENS))) * layout.block_tokens


def held_tokens(layout: KvLayout, pages: int, sequences: int) -> float:
    """Returns about how many tokens of context ``sequences`` sequences (0 counts as 1) have together that hold
    ``pages`` pages while their answers are written. The inverse of ``written_pages``.
    """
    if not layout.windows and not layout.states:
        return float(pages * layout.block_tokens)
    count = max(1, sequences)
    return count * layout.block_tokens * _blocks_in(layout, pages / count, _written_room(layout))


def pool_tokens(layout: KvLayout, pages: int, context: float) -> int:
    """Returns about how many tokens of context fit into ``pages`` pages in sequences of ``context`` tokens each
    while their answers are written.
    """
    tokens = max(context, float(layout.block_tokens))
    return round(pages * tokens / written_pages(layout, tokens))


def written_pages(layout: KvLayout, tokens: float) -> float:
    """Returns about how many pages a sequence of ``tokens`` tokens has while its answer is written, its recurrent
    states included; a page that is partly used counts in part.
    """
    blocks = tokens / layout.block_tokens
    windowed = sum(min(blocks, most) for most in _written_room(layout))
    if window := sliding_window(layout):
        blocks = min(blocks, window / layout.block_tokens + WRITTEN_BEHIND + sunk_blocks(layout))
    return blocks + windowed + WORKING_STATES * state_pages(layout)


def handoff_bytes(layout: KvLayout, tokens: int, held: int = 0) -> int:
    """Returns about how many bytes a handoff of a prompt of ``tokens`` tokens sends if the receiver has KV of the
    first ``held`` ones: at least a run of 16, what is seen of pages with a window, and the recurrent state.
    """
    runs = max(1, -(-(tokens - held) // BLOCK_TOKENS))
    if window := sliding_window(layout):
        runs = min(runs, -(-window // BLOCK_TOKENS) + 1 + sunk_blocks(layout) * layout.runs)
    return runs * layout.run_bytes + window_bytes(layout, tokens) + state_pages(layout) * layout.page_bytes


def context_reads(layout: KvLayout) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Returns the bytes that a decoded token reads per token before it, and of each group of layers with a window
    (the window in tokens, bytes per token within it).
    """
    each = [(group.window, group_bytes(layout.dtype, group) / BLOCK_TOKENS) for group in layout.groups]
    further = [(window, layout.page_bytes / layout.block_tokens) for window in layout.windows[1:]]
    windows = tuple((window, size) for window, size in (*each, *further) if window)
    return sum(size for window, size in each if not window), windows


def _written_room(layout: KvLayout) -> list[float]:
    return [window / layout.block_tokens + WRITTEN_BEHIND for window in layout.windows[1:]]


def _blocks_in(layout: KvLayout, pages: float, most: Sequence[float]) -> float:
    """Returns how many blocks, the last one in part, a sequence of ``pages`` pages has whose further tables have at
    most the numbers of ``most`` pages at once.
    """
    left = max(0, pages - WORKING_STATES * state_pages(layout))
    full = accumulate(sorted(most), initial=0.0)  # pages of so many tables as have all that they ever have
    return max((left - taken) / (1 + len(most) - count) for count, taken in enumerate(full))


def context_room(layout: KvLayout, pages: int, most: int) -> int:
    """Returns the most tokens, up to ``most``, that a prompt and its answer may have together in ``pages`` pages.

    If every layer has a window, an answer frees the pages behind it, so its length is bounded by ``most`` alone.
    """
    return most if sliding_window(layout) else min(most, prompt_room(layout, pages))
