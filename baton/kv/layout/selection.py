"""Says which blocks of a long context attention still sees: all, the first ones and a window, or those that a
prompt's end attended to. Torch-free.

Knows nothing of pages or of attention. A selection is a fidelity of its own: its text is in the layout's
``fidelity``, hence in every block's hash and in what two workers must agree upon before a byte moves.

    fidelity   "float32"                       every token sees all before it
               "float32@sinks:64,window:4096"  it sees the first 64, the last 4,096 and what its own run of 16 has
               "float32@snapkv:1024,window:64" a prompt's tokens see all before them, and its last 64 choose what
                                               the answer still sees of it: about 1,024 tokens, those included

Attention sinks: https://arxiv.org/abs/2309.17453. SnapKV: https://arxiv.org/abs/2404.14469. Tokens keep their
places in the text. With sinks, what a token sees depends on its place alone, in runs of 16 tokens, so that prompts
may be cut, cached and handed off anywhere. With SnapKV only a prompt's own blocks may be found by others.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS, KvLayout

ALL = "all"
MARK = "@"  # in a fidelity, before the selection
SETTING = "worker.kv_selection"
MOST_TOKENS = 1 << 30
WINDOW = 64  # tokens at a prompt's end that choose, where the setting doesn't say
MOST_WATCHED = 1024  # because these are computed in one step, whatever its budget
_DOMAIN = b"baton.slot.v1\x00"


class Selection(NamedTuple):
    """Keeps the first ``sinks`` tokens and the last ``window`` before a token's own run; both are runs of 16."""

    sinks: int
    window: int

    def __str__(self) -> str:
        return f"sinks:{self.sinks},window:{self.window}"

    @property
    def reach(self) -> int:
        """Returns how many tokens back a token sees at most, itself included and the sinks left out."""
        return self.window + BLOCK_TOKENS

    def sunk(self, block_tokens: int) -> int:
        """Returns how many leading blocks of so many tokens hold the sinks."""
        return -(-self.sinks // block_tokens)

    def first_run(self, run: int) -> int:
        """Returns the first run of the window that tokens of ``run`` see, where the sinks are not counted."""
        return max(0, run - self.window // BLOCK_TOKENS)


class Observed(NamedTuple):
    """Keeps about ``budget`` tokens of a prompt: the last ``window``, and the pages that they attend to most."""

    budget: int
    window: int

    def __str__(self) -> str:
        return f"snapkv:{self.budget},window:{self.window}"

    def kept_of(self, prompt: int, block_tokens: int) -> KeptPrompt | None:
        """Returns what of a prompt of so many tokens is kept; None where that is all of it."""
        first = max(0, prompt - self.window) // block_tokens
        slots = (self.budget - self.window) // block_tokens
        return KeptPrompt(slots, first, prompt, block_tokens) if slots < first else None


class KeptPrompt(NamedTuple):
    """Says what is kept of a prompt of ``tokens`` tokens that is over the budget, in blocks of ``block_tokens``.

    The blocks from ``first`` on are kept as they are; their tokens choose ``slots`` blocks of those before, which
    then lie in the places of blocks 0 … ``slots`` - 1. The places between have no page.
    """

    slots: int
    first: int
    tokens: int
    block_tokens: int

    @property
    def gap(self) -> tuple[int, int]:
        """Returns the blocks without a page, from the first one to the one before the second."""
        return self.slots, self.first

    @property
    def watched(self) -> int:
        """Returns the place of the first token that chooses."""
        return self.first * self.block_tokens

    def cut(self, start: int, end: int) -> int:
        """Returns where a step from ``start`` that might go to ``end`` stops.

        The tokens that choose are computed in one step, longer than asked where need be, and none behind them with
        them: so what they choose doesn't depend on the steps.
        """
        if start >= self.tokens:
            return end
        if end >= self.tokens or start == self.watched:
            return self.tokens
        return min(end, self.watched)

    def watched_in(self, start: int, end: int) -> int | None:
        """Returns where the tokens that choose begin, if a step from ``start`` to ``end`` computes them."""
        return self.watched if start <= self.watched and end == self.tokens else None

    def chosen(self, scores: Sequence[float]) -> list[int]:
        """Returns the blocks that are kept of those before the watched ones, in order, by their ``scores``."""
        best = sorted(range(self.first), key=lambda block: (-scores[block], block))
        return sorted(best[: self.slots])

    def named(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Returns the hashes of a prompt's blocks, with names of their own for the places of those chosen.

        A name says whose choice it is and which of it, not what was chosen: such blocks are shipped, never found.
        """
        own = [sha256(_DOMAIN + hashes[-1] + struct.pack("<I", slot)).digest() for slot in range(self.slots)]
        return [*own, *hashes[self.slots :]]


def parsed(text: str) -> Selection | Observed | None:
    """Returns what ``worker.kv_selection`` says, None for all. Raises ConfigError."""
    if text == ALL:
        return None
    found = re.fullmatch(r"(sinks|snapkv):(\d{1,9})(?:,window:(\d{1,9}))?", text)
    if found is None or (found[1] == "sinks" and found[3] is None):
        choices = "use all, sinks:64,window:4096 or snapkv:1024,window:64"
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
    return Observed(kept, window)


def marked(fidelity: str, selection: Selection | Observed | None) -> str:
    """Returns ``fidelity`` with what is selected, if not all is."""
    return fidelity if selection is None else f"{fidelity}{MARK}{selection}"


def _of(layout: KvLayout) -> Selection | Observed | None:
    """What a layout says; None also for what a newer peer's says, whose fidelity is refused as another."""
    try:
        return parsed(layout.fidelity.partition(MARK)[2] or ALL)
    except ConfigError:
        return None


def selection_of(layout: KvLayout) -> Selection | None:
    """Returns the sinks and the window of a worker of ``layout``; None where places don't tell what is seen."""
    found = _of(layout)
    return found if isinstance(found, Selection) else None


def observed_of(layout: KvLayout) -> Observed | None:
    """Returns what a worker of ``layout`` keeps by attention; None where it keeps all, or by place."""
    found = _of(layout)
    return found if isinstance(found, Observed) else None


def kept_of(layout: KvLayout, prompt: int) -> KeptPrompt | None:
    """Returns what a worker of ``layout`` keeps of a prompt of so many tokens; None where that is all of it."""
    observed = observed_of(layout)
    return None if observed is None else observed.kept_of(prompt, layout.block_tokens)
