"""One grammar in a process of its own: compiled, followed, and killed by the kernel if it exceeds its bounds.

Knows nothing of engines or routers. The library's own limits count some of its work; a derivative of an
intersection can take minutes and gigabytes between two of its counts. So the kernel limits it too: CPU time per
message (a timer whose signal ends the process) and address space.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLTokenizer

from baton.grammars.limits import ProcessBounds
from baton.grammars.messages import (
    MOST_FORCED,
    PACKET_BYTES,
    Advance,
    Compile,
    CompileResult,
    Forget,
    FromChild,
    NextMask,
    Preview,
    PreviewMask,
    ProcessReady,
    ToChild,
)
from baton.protos.errors import InvalidRequest
from baton.protos.grammar import compiled, require_sound
from baton.protos.nouns import Grammar

_PREVIEW_CPU_S = 0.004  # nobody waits longer for a preview, which others' masks queue behind


def serve(sock: socket.socket, tokenizer: LLTokenizer, bounds: ProcessBounds) -> None:
    """Answers the messages that come on ``sock`` until the peer closes it, within ``bounds``."""
    _limit(bounds.memory_bytes)
    sock.send(msgspec.msgpack.encode(ProcessReady()))
    decoder, worker = msgspec.msgpack.Decoder(ToChild), SequenceMatchers(tokenizer)
    while packet := sock.recv(PACKET_BYTES):
        message = decoder.decode(packet)
        signal.setitimer(signal.ITIMER_PROF, _cpu_s(message, bounds))
        for reply in worker.take(message):
            sock.send(msgspec.msgpack.encode(reply))
        signal.setitimer(signal.ITIMER_PROF, 0)


class SequenceMatchers:
    """Holds one compiled grammar, and the position of each sequence in it."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer, self._began = tokenizer, _peak_bytes()
        self._base: LLMatcher | None = None
        self._matchers: dict[int, tuple[LLMatcher, int]] = {}

    def take(self, message: ToChild) -> Iterator[FromChild]:
        """Acts on a message; yields its answers."""
        if isinstance(message, Compile):
            yield self._compile(message)
        elif isinstance(message, Preview):
            yield from self._preview(message)
        elif isinstance(message, Forget):
            self._matchers.pop(message.seq, None)
        elif (reply := self._advance(message)) is not None:
            yield reply

    def _compile(self, message: Compile) -> CompileResult:
        error = ""
        try:
            self._base = compiled(Grammar(message.kind, message.spec), self._tokenizer)
        except InvalidRequest as refusal:
            error = refusal.message
        return CompileResult(error, self._grown())

    def _advance(self, message: Advance) -> NextMask | None:
        matcher, taken = self._matchers.get(message.seq) or (self._begin(), 0)
        taken += len(message.ids)
        self._matchers[message.seq] = matcher, taken
        for token in message.ids:
            if matcher.is_stopped():
                break  # the end token after a complete answer
            matcher.compute_ff_tokens()  # forces bytes as a mask between two tokens does
            matcher.consume_tokens([token])
        return None if message.more else self._at(message.seq, matcher, taken)

    def _preview(self, message: Preview) -> Iterator[PreviewMask]:
        """Yields the masks along the message's tokens, found on a copy, so that the sequence doesn't move.

        The copy shares the sequence's lexer, whose limits count what is previewed too.
        """
        began = time.process_time()
        matcher = self._matchers[message.seq][0].deep_copy()
        for token in message.ids:
            if time.process_time() - began > _PREVIEW_CPU_S or not matcher.try_consume_tokens([token]):
                break
            if matcher.is_stopped() or matcher.is_error():
                break
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                break
            yield PreviewMask(message.seq, message.number, mask)
        yield PreviewMask(message.seq, message.number, b"")

    def _begin(self) -> LLMatcher:
        assert self._base is not None, "a sequence before its grammar"
        return self._base.deep_copy()

    def _at(self, seq: int, matcher: LLMatcher, taken: int) -> NextMask:
        stopped, mask, error, forced = False, b"", "", list[int]()
        try:
            require_sound(matcher)
            stopped = matcher.is_stopped()
            mask = b"" if stopped else matcher.compute_bitmask()
            require_sound(matcher)
            forced = [] if stopped else matcher.compute_ff_tokens()
        except InvalidRequest as refusal:
            error = refusal.message
        return NextMask(seq, taken, stopped, error, mask, self._grown(), tuple(forced[:MOST_FORCED]))

    def _grown(self) -> int:
        return _peak_bytes() - self._began


def _cpu_s(message: ToChild, bounds: ProcessBounds) -> float:
    if isinstance(message, Compile):
        return bounds.compile_cpu_s
    return bounds.step_cpu_s + bounds.token_cpu_s * (0 if isinstance(message, Forget) else len(message.ids))


def _limit(memory_bytes: int) -> None:
    """The kernel's bounds; and where memory is short all the same, it takes this process first."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(OSError):  # a kernel without it, or a sandbox that forbids it
        Path("/proc/self/oom_score_adj").write_text("1000")
    quiet = os.open(os.devnull, os.O_WRONLY)  # what an allocator says as it dies; our peer logs the end
    os.dup2(quiet, 2)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
