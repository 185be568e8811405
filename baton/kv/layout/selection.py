"""Says which blocks of a long context attention still sees: all, or the first ones and a window. Torch-free.

Knows nothing of pages or of attention. A selection is a fidelity of its own: its text is in the layout's
``fidelity``, hence in every block's hash and in what two workers must agree upon before a byte moves.

    fidelity   "float32"                       every token sees all before it
               "float32@sinks:64,window:4096"  it sees the first 64, the last 4,096 and what its own run of 16 has

Attention sinks: https://arxiv.org/abs/2309.17453. Tokens keep their places in the text. What a token sees depends
on its place alone, in runs of 16 tokens, so that prompts may be cut, cached and handed off anywhere.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS, KvLayout

ALL = "all"
MARK = "@"  # in a fidelity, before the selection
SETTING = "worker.kv_selection"
MOST_TOKENS = 1 << 30


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


def parsed(text: str) -> Selection | None:
    """Returns what ``worker.kv_selection`` says, None for all. Raises ConfigError."""
    if text == ALL:
        return None
    found = re.fullmatch(r"sinks:(\d{1,9}),window:(\d{1,9})", text)
    if found is None:
        raise ConfigError(f"{SETTING} {text!r} is unknown; use all, or sinks:64,window:4096", SETTING)
    selection = Selection(int(found[1]), int(found[2]))
    if any(count % BLOCK_TOKENS for count in selection) or selection.window < BLOCK_TOKENS:
        text = (
            f"{SETTING} {text!r}: give multiples of {BLOCK_TOKENS} tokens, and a window of {BLOCK_TOKENS} or more"
        )
        raise ConfigError(text, SETTING)
    return selection


def marked(fidelity: str, selection: Selection | None) -> str:
    """Returns ``fidelity`` with what is selected, if not all is."""
    return fidelity if selection is None else f"{fidelity}{MARK}{selection}"


def selection_of(layout: KvLayout) -> Selection | None:
    """Returns what a worker of ``layout`` selects; None for all."""
    return parsed(layout.fidelity.partition(MARK)[2] or ALL)
