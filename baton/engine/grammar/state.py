"""The place of one sequence in its grammar: the mask of its next token, and those after drafts.

Knows nothing of how a grammar is compiled or followed, which a process does; it is asked, and answers later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np

from baton.engine.grammar.process import GrammarProcess
from baton.engine.masks import Mask
from baton.grammars.messages import NextMask, PreviewMask
from baton.grammars.server import ForkedGrammar
from baton.protos.errors import BatonError, InvalidRequest


class AnswerWaiter(Protocol):
    """Waits for the answers of grammars' processes; ``engine.grammar.running.Grammars`` is the real one."""

    def wait(self, state: GrammarState, for_ever: bool = False) -> None:
        """Waits until ``state`` is ready, no longer than a step may unless ``for_ever``."""

    def wait_previewed(self, state: GrammarState) -> None:
        """Waits until ``state``'s preview is complete, no longer than a step may."""


class GrammarState:
    """The position of one sequence in its grammar. Only the engine's step thread may use it."""

    def __init__(self, grammars: AnswerWaiter, process: GrammarProcess, emitted: Sequence[int]) -> None:
        self._grammars, self.process = grammars, process
        self.tokens = list(emitted)
        self._at: NextMask | None = None
        self._error: BatonError | None = None
        self._told_ahead = 0  # of the last tokens
        self._previews, self._preview = 0, _Preview(0)
        self._seq = process.join(self)

    @property
    def ready(self) -> bool:
        """Returns whether the answer after the last token has come, or an error, so that no method waits."""
        return self.error is not None or (self._at is not None and self._at.taken == len(self.tokens))

    @property
    def error(self) -> BatonError | None:
        """Returns the reason why the grammar can't be followed, or None."""
        return self._error or self.process.error

    @property
    def done(self) -> bool:
        """Returns whether the answer is complete, so that no token may follow; waits for the grammar as long as the
        step's grace allows.

        It is False if the grace ended first, and after an error, which ``mask`` raises.
        """
        if self._told_ahead:
            return False  # what is told ahead may follow
        if not self.ready:
            self._grammars.wait(self)
        return self.ready and self.error is None and self._at is not None and self._at.stopped

    def tell_ahead(self, token_ids: Sequence[int]) -> None:
        """Advances by tokens before ``take`` is called with each of them, so that many sequences' grammars are
        computed in parallel.
        """
        self._advance(token_ids)
        self._told_ahead = len(token_ids)

    def take(self, token_id: int) -> None:
        """Advances by an emitted token. If that is impossible, the next ``mask`` raises the error."""
        if not self._told_ahead:
            self._advance((token_id,))
            return
        assert self.tokens[-self._told_ahead] == token_id, "another token than was told ahead"
        self._told_ahead -= 1

    def _advance(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids
        if self.error is None:
            self.process.ask(self._seq, token_ids)

    def mask(self, vocab_size: int) -> Mask:
        """Returns which token ids may come next, bool (vocab_size,); waits for the grammar. Raises InvalidRequest
        if none may.
        """
        self._grammars.wait(self, for_ever=True)
        if self.error is not None:
            raise self.error
        assert self._at is not None
        mask = _unpacked(self._at.mask, vocab_size)
        if not mask.any():
            raise InvalidRequest("the grammar allows no token of this model here", "grammar")
        return mask

    # ---- drafts ----

    @property
    def follows_drafts(self) -> bool:
        """Returns whether the grammar can tell what may follow drafts."""
        return self.process.previews

    @property
    def forced(self) -> Sequence[int]:
        """Returns token ids that spell what has to follow, empty if several texts may or it isn't known yet."""
        return self._at.forced if self._at is not None and self.error is None and self.ready else ()

    def preview(self, ids: Sequence[int]) -> None:
        """Asks what may follow each of the drafts ``ids``; ``mask_after`` and ``followed`` tell the answers."""
        self._previews += 1
        self._preview = _Preview(self._previews)
        if self.ready:
            self._preview.process = self.process.preview(self._seq, self._previews, ids)

    @property
    def has_previewed(self) -> bool:
        """Returns whether the preview is complete, or no more of it can come."""
        process = self._preview.process
        return process is None or process is not self.process.child

    def mask_after(self, count: int, vocab_size: int) -> Mask:
        """Returns which token ids may follow the first ``count`` drafts of the preview, bool (vocab_size,).

        All may where that isn't known in time, or nothing may follow; ``followed`` is then less than ``count``.
        """
        preview = self._preview
        if preview.known is None:
            self._grammars.wait_previewed(self)
            preview.known = list(takewhile(np.any, [_unpacked(mask, vocab_size) for mask in preview.masks]))
        return preview.known[count - 1] if count <= len(preview.known) else np.ones(vocab_size, np.bool_)

    @property
    def followed(self) -> int:
        """Returns how many drafts of the preview may be accepted: after which the masks were known in time."""
        return 0 if self._preview.known is None else len(self._preview.known)

    def previewed(self, at: PreviewMask) -> None:
        """Takes the next mask of the preview, or its end; those of an earlier preview are ignored."""
        if at.number != self._preview.number:
            return
        if at.mask:
            self._preview.masks.append(at.mask)
        else:
            self._preview.process = None

    # ---- what the grammar's process says ----

    def arrived(self, at: NextMask) -> None:
        """Takes the grammar's answer after some of the sequence's tokens."""
        self._at = at
        if at.error:
            self.fail(InvalidRequest(at.error, "grammar"))

    def fail(self, error: BatonError) -> None:
        """Records that the grammar can't be followed any more."""
        self._error = error


class _Preview:
    """Holds the masks after each draft of a step, in turn; ``known`` are those that the step is computed with."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: ForkedGrammar | None = None  # that has yet to answer
        self.masks: list[bytes] = []
        self.known: list[Mask] | None = None


def _unpacked(mask: bytes, vocab_size: int) -> Mask:
    """Returns the bits of ``mask`` as bool (vocab_size,); ids that it doesn't have are not allowed."""
    bits = np.frombuffer(mask, np.uint8)
    found = np.unpackbits(bits, count=min(vocab_size, 8 * len(bits)), bitorder="little").view(np.bool_)
    return found if len(found) == vocab_size else np.pad(found, (0, vocab_size - len(found)))
