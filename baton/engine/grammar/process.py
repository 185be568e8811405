"""Follows one grammar in a child process: keeps its requests, and passes its answers to the sequences.

Knows nothing of when it may compile (``running``) or of what a mask means. If the process dies,
the sequence whose token it was processing is the cause, and fails; the others continue in a new process, and
so do all if something else killed it.
What fails after previews is tried once more without, because previews leave memory and states of the lexer behind.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from baton.grammars.limits import RESTARTS
from baton.grammars.messages import (
    MOST_IDS,
    Advance,
    CompileResult,
    Forget,
    FromChild,
    NextMask,
    Preview,
    PreviewMask,
    compile_of,
)
from baton.grammars.server import ForkedGrammar, ForkServer
from baton.protos.errors import BatonError, InvalidRequest, Overloaded, Unavailable
from baton.protos.nouns import TENANT_SALT_BYTES, Grammar

log = logging.getLogger("baton.engine")


class GrammarFollower(Protocol):
    """A sequence that follows a grammar; ``tokens`` are all of its output tokens so far."""

    tokens: list[int]

    def arrived(self, at: NextMask) -> None:
        """Takes the grammar's answer after some of the sequence's tokens: the next mask, or an error."""

    def previewed(self, at: PreviewMask) -> None:
        """Takes the mask after the next token of a preview, or its end."""

    def fail(self, error: BatonError) -> None:
        """Reports that the grammar can't be followed any more."""


class GrammarProcess:
    """Compiles one tenant's grammar and follows it for every sequence that joined, in a child process.

    A sequence leaves by dropping its follower, which is referenced weakly.
    """

    def __init__(self, salt: bytes, grammar: Grammar, server: ForkServer) -> None:
        self.key = salt, grammar
        self.tenant, self.grammar, self._server = salt[:TENANT_SALT_BYTES], grammar, server
        self.child: ForkedGrammar | None = None
        self.error: BatonError | None = None
        self.compiling = self.in_line = self._compiled = False
        self.grown = 0
        self._lost = 0
        self._followers: WeakValueDictionary[int, GrammarFollower] = WeakValueDictionary()
        self._known: set[int] = set()  # sequences that the process knows
        self._asked: deque[tuple[int, bool]] = deque()  # (sequence, for a preview), in the order of the answers
        self.previews = True  # until they may have been too much for the process
        self._previewed = False  # the child process has been asked for previews
        self._serials = itertools.count()

    @property
    def wanted(self) -> bool:
        """Returns whether any sequence follows the grammar."""
        return len(self._followers) > 0

    @property
    def queued(self) -> bool:
        """Returns whether the grammar has yet to be compiled."""
        return self.child is None and self.error is None and self.wanted

    @property
    def left(self) -> bool:
        """Returns whether the process still has sequences that have ended."""
        return len(self._known) > len(self._followers)

    @property
    def broken(self) -> bool:
        """Returns whether the grammar failed for a reason that may have passed, not because it is invalid."""
        return self.error is not None and not isinstance(self.error, InvalidRequest)

    @property
    def awaited(self) -> bool:
        """Returns whether a sequence waits for an answer."""
        return self.queued or (self.wanted and (self.compiling or bool(self._asked)))

    def compile(self) -> None:
        """Starts to compile the grammar in a child process; it stays queued if the machine has none to spare."""
        try:
            message = compile_of(self.grammar)
        except InvalidRequest as error:  # a router would have said so
            self.fail(error)
            return
        try:
            self.child = self._server.child()
        except OSError as error:
            log.warning("no process to compile a grammar: %s", error)
            self._lose()
            return
        self.compiling = True
        self.child.send(message)
        self._server.warm()

    def join(self, follower: GrammarFollower) -> int:
        """Lets ``follower`` follow the grammar, beginning with its tokens so far; returns the number for
        ``ask``.
        """
        self.feed()  # a process that ended while it was idle died of nobody's token
        seq = next(self._serials)
        self._followers[seq] = follower
        if self._compiled:
            self._ask(seq, follower.tokens)
        return seq

    def ask(self, seq: int, ids: Sequence[int]) -> None:
        """Advances sequence ``seq`` by tokens ``ids``. Before the grammar is compiled this does nothing, because
        all tokens are sent then.
        """
        if self._compiled:
            self._ask(seq, ids)

    def preview(self, seq: int, number: int, ids: Sequence[int]) -> ForkedGrammar | None:
        """Asks what may follow each of ``ids`` after sequence ``seq``'s tokens; returns the process that was asked,
        or None if none can be.
        """
        if not self.previews or not self._compiled or self.child is None or seq not in self._known:
            return None
        self._previewed = True
        self._asked.append((seq, True))
        self.child.send(Preview(seq, number, tuple(ids)))
        return self.child

    def feed(self) -> None:
        """Passes on the answers that have come, and drops ended sequences from the process."""
        try:
            while self.child is not None and (message := self.child.receive()) is not None:
                self._hear(message)
        except EOFError:
            self._ended()
        if self.child is not None and self.left:
            for seq in self._known - set(self._followers):
                self._known.remove(seq)
                self.child.send(Forget(seq))

    def fail(self, error: BatonError) -> None:
        """Ends the process; every sequence that follows the grammar gets ``error``."""
        self.close()
        self.error = error

    def fail_large(self) -> None:
        """Ends the largest of processes that take too much memory together: it begins anew if previews may be
        why, else it fails until the next request.
        """
        if self._previewed:
            self._distrust()
        else:
            text = "the grammars of running requests take too much memory together: ask again when some have ended"
            self.fail(Overloaded(text, "grammar", retry_after_s=1.0))

    def close(self) -> None:
        """Kills the child process."""
        if self.child is not None:
            self.child.kill()
        self.child, self.grown = None, 0
        self.compiling = self._compiled = self._previewed = False
        self._known.clear()
        self._asked.clear()

    def _ask(self, seq: int, ids: Sequence[int]) -> None:
        assert self.child is not None
        self._known.add(seq)
        self._asked.append((seq, False))
        whole = max(0, (len(ids) - 1) // MOST_IDS * MOST_IDS)
        for at in range(0, whole, MOST_IDS):
            self.child.send(Advance(seq, tuple(ids[at : at + MOST_IDS]), more=True))
        self.child.send(Advance(seq, tuple(ids[whole:])))

    def _hear(self, message: FromChild) -> None:
        if isinstance(message, CompileResult):
            self._heard_compiled(message)
        elif isinstance(message, NextMask):
            self._asked.popleft()
            if message.error and self._previewed:
                self._distrust()
                return
            self.grown = message.grown
            if (follower := self._followers.get(message.seq)) is not None:
                follower.arrived(message)
        elif isinstance(message, PreviewMask):
            if not message.mask:
                self._asked.popleft()
            if (follower := self._followers.get(message.seq)) is not None:
                follower.previewed(message)

    def _distrust(self) -> None:
        """Ends the process, so that the grammar is compiled again and followed without previews."""
        log.info("a grammar of %d bytes was too much to preview; its answers get no drafts", len(self.grammar.spec))
        self.close()
        self.previews = False

    def _heard_compiled(self, message: CompileResult) -> None:
        self.compiling, self.grown = False, message.grown
        if message.error:
            self.fail(InvalidRequest(message.error, "grammar"))
            return
        self._compiled = True
        for seq, follower in list(self._followers.items()):
            self._ask(seq, follower.tokens)

    def _ended(self) -> None:
        """Determines why the process died: of something else, the grammar, previews, or a sequence's token."""
        asked, was_preview = next(iter(self._asked), (None, False))
        was_compiling, was_preview = self.compiling, was_preview or (self._previewed and asked is not None)
        exceeded = self.child is not None and self.child.exceeded
        self.close()
        if not exceeded:
            self._lose()
        elif was_compiling:
            log.info("a grammar of %d bytes was too much to compile", len(self.grammar.spec))
            self.error = InvalidRequest(self._server.bounds.exceeded, "grammar")
        elif was_preview:
            self._distrust()
        elif asked is not None:
            log.info("a grammar of %d bytes was too much to follow", len(self.grammar.spec))
            if (culprit := self._followers.pop(asked, None)) is not None:
                culprit.fail(InvalidRequest(self._server.bounds.exceeded, "grammar"))
        else:
            self._lose()

    def _lose(self) -> None:
        self._lost += 1
        if reason := self._server.why_none():
            self.error = InvalidRequest(reason, "grammar")
        elif self._lost > RESTARTS:
            text = "the processes that follow grammars don't start or are killed; ask again, and see its log"
            self.error = Unavailable(text, "grammar")
