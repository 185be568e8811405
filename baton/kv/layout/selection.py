"""Defines which blocks of a long context attention can see: all, the first ones and a window, or those that the
end of the prompt attended to. Torch-free.

Knows nothing of pages or of attention. A selection is a fidelity of its own: its text is in the layout's
``fidelity``, hence in every block's hash and in what two workers must agree on before any KV is sent.

    fidelity   "float32"                       every token sees all before it
               "float32@sinks:64,window:4096"  it sees the first 64, the last 4,096 and those in its own run of 16
               "float32@snapkv:1024,window:64" a prompt's tokens see all before them, and its last 64 select which
                                               the answer can see: about 1,024 tokens, the 64 included
               "float32@h2o:1024,window:64"    so does it begin; the answer then gives up, page by page, what its
                                               tokens attended to least, and sees about 1,024 tokens all along

Attention sinks: https://arxiv.org/abs/2309.17453. SnapKV: https://arxiv.org/abs/2404.14469. H2O:
https://arxiv.org/abs/2306.14048 (``running.py``). Tokens keep their positions. With sinks, what a token sees
depends on its position alone, in runs of 16 tokens, so that prompts may be split, cached and handed off at any run.
With SnapKV and H2O other requests can find only the blocks of the prompt.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest, KvLayout

ALL = "all"
MARK = "@"  # separates the selection from the rest of a fidelity
SETTING = "worker.kv_selection"
MOST_TOKENS = 1 << 30  # tokens of a window at most
WINDOW = 64  # tokens at a prompt's end that select, unless the setting gives their number
MOST_WATCHED = 1024  # tokens; limited because they are computed in one step, whatever its budget
_DOMAIN = b"baton.slot.v1\x00"


class Selection(NamedTuple):
    """Lets a token attend to the first ``sinks`` tokens and to the ``window`` tokens before its own run of 16; both
    are multiples of 16.
    """

    sinks: int
    window: int

    def __str__(self) -> str:
        return f"sinks:{self.sinks},window:{self.window}"

    @property
    def reach(self) -> int:
        """Returns the most tokens back that a token can attend to, itself included, sinks not counted."""
        return self.window + BLOCK_TOKENS

    def sunk(self, block_tokens: int) -> int:
        """Returns how many leading blocks of ``block_tokens`` tokens hold the sinks."""
        return -(-self.sinks // block_tokens)

    def first_run(self, run: int) -> int:
        """Returns the index of the first run of 16 tokens, other than sinks, that tokens of run ``run`` can attend
        to.
        """
        return max(0, run - self.window // BLOCK_TOKENS)


class AttentionSelection(NamedTuple):
    """Keeps about ``budget`` tokens of a prompt: the last ``window``, and the pages that they attend to most
    (SnapKV); if ``running``, of the answer, too (H2O).
    """

    budget: int
    window: int
    running: bool = False

    def __str__(self) -> str:
        return f"{'h2o' if self.running else 'snapkv'}:{self.budget},window:{self.window}"

    def prompt_selection_of(self, prompt: int, block_tokens: int) -> PromptSelection | None:
        """Returns which blocks of a prompt of ``prompt`` tokens are kept; None if all are."""
        first = max(0, prompt - self.window) // block_tokens
        slots = (self.budget - self.window) // block_tokens
        return PromptSelection(slots, first, prompt, block_tokens) if slots < first else None


class PromptSelection(NamedTuple):
    """Represents which blocks, of ``block_tokens`` tokens each, are kept of a prompt that is longer than the
    budget.

    The blocks from ``first`` on are kept as they are; their tokens select ``slots`` of the blocks before, which are
    then stored in the places of blocks 0 to ``slots`` - 1. The places between have no page.
    """

    slots: int  # selected blocks
    first: int  # index of the first block that is kept as it is
    tokens: int  # tokens of the prompt
    block_tokens: int

    @property
    def gap(self) -> tuple[int, int]:
        """Returns the range of block places without a page: the first one, and the one after the last."""
        return self.slots, self.first

    @property
    def watched(self) -> int:
        """Returns the position of the first token whose attention selects blocks."""
        return self.first * self.block_tokens

    def cut(self, start: int, end: int) -> int:
        """Returns the position at which a step from ``start`` that could extend to ``end`` has to stop.

        The selecting tokens are computed in one step, longer than asked if necessary, and without tokens after
        them, so the selection doesn't depend on how the prompt is split into steps.
        """
        if start >= self.tokens:
            return end
        if end >= self.tokens or start == self.watched:
            return self.tokens
        return min(end, self.watched)

    def watched_in(self, start: int, end: int) -> int | None:
        """Returns the position of the first selecting token if a step from ``start`` to ``end`` computes the
        selecting tokens, else None.
        """
        return self.watched if start <= self.watched and end == self.tokens else None

    def chosen(self, scores: Sequence[float]) -> list[int]:
        """Returns the indices, ascending, of the ``slots`` blocks with the highest ``scores`` among the blocks
        before the selecting ones.
        """
        best = sorted(range(self.first), key=lambda block: (-scores[block], block))
        return sorted(best[: self.slots])

    def named(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Returns the hashes of the prompt's blocks, with those of the first ``slots`` places replaced by names for
        the selected blocks.

        Such a name depends on the prompt and the place, not on which block was selected: these blocks are shipped,
        but never found in a cache.
        """
        own = [sha256(_DOMAIN + hashes[-1] + struct.pack("<I", slot)).digest() for slot in range(self.slots)]
        return [*own, *hashes[self.slots :]]


def parsed(text: str) -> Selection | AttentionSelection | None:
    """Returns the selection that the text of ``worker.kv_selection`` describes, None for "all". Raises ConfigError
    if it is invalid.
    """
    if text == ALL:
        return None
    found = re.fullmatch(r"(sinks|snapkv|h2o):(\d{1,9})(?:,window:(\d{1,9}))?", text)
    if found is None or (found[1] == "sinks" and found[3] is None):
        choices = "use all, sinks:64,window:4096, snapkv:1024,window:64 or h2o:1024,window:64"
        raise ConfigError(f"{SETTING} {text!r} is unknown; {choices}", SETTING)
    kept, window = int(found[2]), int(found[3] or WINDOW)
    if kept % BLOCK_TOKENS or window % BLOCK_TOKENS or not BLOCK_TOKENS <= window <= MOST_TOKENS:
        text = (
            f"{SETTING} {text!r}: give multiples of {BLOCK_TOKENS} tokens, and a window of {BLOCK_TOKENS} or more"
        )
        raise ConfigError(text, SETTING)
    if found[1] == "sinks":
        return Selection(kept, window)
    if kept <= window or window > MOST_WATCHED:
        text = f"{SETTING} {text!r}: give a window of {MOST_WATCHED} at most, and more tokens than it has"
        raise ConfigError(text, SETTING)
    return AttentionSelection(kept, window, found[1] == "h2o")


def marked(fidelity: str, selection: Selection | AttentionSelection | None) -> str:
    """Returns ``fidelity`` with the text of ``selection`` appended, unless that is None."""
    return fidelity if selection is None else f"{fidelity}{MARK}{selection}"


def _of(layout: KvLayout) -> Selection | AttentionSelection | None:
    """Returns the selection of a layout; also None if a newer peer's is unknown, whose fidelity is refused as
    different.
    """
    try:
        return parsed(layout.fidelity.partition(MARK)[2] or ALL)
    except ConfigError:
        return None


def selection_of(layout: KvLayout) -> Selection | None:
    """Returns the sinks and window of a worker of ``layout``; None if what is seen doesn't depend on position
    alone.
    """
    found = _of(layout)
    return found if isinstance(found, Selection) else None


def observed_of(layout: KvLayout) -> AttentionSelection | None:
    """Returns the SnapKV or H2O selection of a worker of ``layout``; None if it has another one, or none."""
    found = _of(layout)
    return found if isinstance(found, AttentionSelection) else None


def prompt_selection_of(layout: KvLayout, prompt: int) -> PromptSelection | None:
    """Returns which blocks of a prompt of ``prompt`` tokens a worker of ``layout`` keeps; None if all."""
    observed = observed_of(layout)
    return None if observed is None else observed.prompt_selection_of(prompt, layout.block_tokens)


def chosen_from(layout: KvLayout, request: EngineRequest, is_local: bool) -> int:
    """Returns how many of a request's tokens count as the prompt, whose end selects what is kept of them.

    These are the client's tokens. With H2O, an answer that goes on elsewhere begins with all tokens so far, because
    the scores of its pages don't travel, unless the worker that goes on reads them itself (``is_local``).
    """
    observed = observed_of(layout)
    whole = observed is not None and observed.running and not is_local
    return len(request.token_ids) if whole else request.prompt_tokens
