"""Grammars whose processes the machine kills, or has none to spare for: no client's fault, and no engine's end."""

from __future__ import annotations

import errno
import os
import select
import signal

import pytest

from baton.engine.grammar import running as grammar
from baton.engine.grammar.running import Grammars
from baton.engine.grammar.state import GrammarState
from baton.grammars.limits import RESTARTS, ProcessBounds
from baton.grammars.server import ForkedGrammar, ForkServer
from baton.protos.errors import Overloaded, Unavailable
from tests.engine.grammar.test_bounds import SPEC, begun, forked

WITHIN_MS = 60_000


def fresh(number: int) -> Grammars:
    """Grammars whose forking process is no other test's."""
    return Grammars(SPEC, bounds=ProcessBounds(compile_cpu_s=30.0 + number))


def heard(child: ForkedGrammar | None, event: int) -> None:
    """Waits until ``event``, or the end, is at the socket of ``child``."""
    assert child is not None
    poller = select.poll()
    poller.register(child.socket, event)
    assert poller.poll(WITHIN_MS)


def stopped(grammars: Grammars) -> int:
    """Stops the process that is ready for the next grammar; returns its id."""
    grammars.warm()
    spare = grammars._server._spare
    assert spare is not None
    if not spare.begun:
        heard(spare, select.POLLIN)
    os.kill(pid := forked(grammars)[-1], signal.SIGSTOP)
    return pid


def writes(state: GrammarState, text: bytes) -> None:
    for token in text:
        assert state.mask(400)[token]
        state.take(token)


@pytest.mark.parametrize("ended", [True, False])
def test_a_process_that_was_killed_while_it_was_idle_costs_no_answer(ended: bool) -> None:
    state = begun(grammars := fresh(9 if ended else 0), "[a-f]{3}x", "regex")
    writes(state, b"a")
    state.mask(400)
    child = state.process.child
    os.kill(pid := forked(grammars)[0], signal.SIGSTOP)
    if ended:
        os.kill(pid, signal.SIGKILL)
        heard(child, 0)
    state.take(ord("b"))
    if not ended:
        os.kill(pid, signal.SIGKILL)
    writes(state, b"cx")
    assert state.done


def test_a_process_that_was_killed_while_it_compiled_is_begun_again() -> None:
    pid = stopped(grammars := fresh(1))
    state = begun(grammars, "[a-f]{3}x", "regex")
    assert state.process.compiling
    os.kill(pid, signal.SIGKILL)
    writes(state, b"abcx")
    assert state.done


def test_a_process_that_was_killed_ahead_of_its_grammar_is_replaced() -> None:
    pid = stopped(grammars := fresh(2))
    spare = grammars._server._spare
    os.kill(pid, signal.SIGKILL)
    heard(spare, 0)
    state = begun(grammars, "[a-f]{3}x", "regex")
    assert state.process.child is not spare
    writes(state, b"abcx")


def test_a_preview_whose_process_was_killed_keeps_its_drafts() -> None:
    state = begun(grammars := fresh(3), "[a-f]{3}x", "regex")
    state.mask(400)
    os.kill(pid := forked(grammars)[0], signal.SIGSTOP)
    state.preview(tuple(b"ab"))
    os.kill(pid, signal.SIGKILL)
    assert state.mask_after(1, 400).all()
    assert state.follows_drafts
    writes(state, b"abcx")


def test_one_that_is_killed_again_and_again_is_unavailable_until_the_next_request() -> None:
    pid = stopped(grammars := fresh(4))
    state = begun(grammars, "[a-f]{3}x", "regex")
    for again in range(RESTARTS + 1):
        child, last = state.process.child, pid
        if again < RESTARTS:
            pid = stopped(grammars)
        os.kill(last, signal.SIGKILL)
        heard(child, 0)
        grammars.turn()  # hears the end, and begins again
        assert state.process.child is not child
    assert isinstance(state.error, Unavailable)
    writes(begun(grammars, "[a-f]{3}x", "regex"), b"abcx")


def test_everybodys_memory_is_not_the_largest_grammars_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    state = begun(grammars := fresh(5), "[a-f]{3}x", "regex")
    state.mask(400)
    monkeypatch.setattr(grammar, "TOTAL_BYTES", 0)
    grammars.turn()
    monkeypatch.undo()
    assert isinstance(state.error, Overloaded)
    assert state.error.retry_after_s > 0
    writes(begun(grammars, "[a-f]{3}x", "regex"), b"abcx")


class Short:
    """A machine that has no process to spare the next ``left`` times."""

    def __init__(self, patch: pytest.MonkeyPatch, what: str, left: int) -> None:
        self.left, self._real = left, getattr(ForkServer, what)
        patch.setattr(ForkServer, what, lambda server: self._call(server))

    def _call(self, server: ForkServer) -> object:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._real(server)


@pytest.mark.parametrize("what", ["_start", "_fork"])
def test_a_grammar_waits_for_a_machine_that_has_no_process_to_spare(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    grammars = fresh(6 if what == "_start" else 7)
    short = Short(monkeypatch, what, RESTARTS)
    grammars.warm()
    state = begun(grammars, "[a-f]{3}x", "regex")
    writes(state, b"abcx")
    assert state.done
    assert not short.left


def test_without_a_process_for_good_one_request_is_unavailable_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = fresh(8)
    beside = begun(grammars, "[a-f]{3}y", "regex", tenant=b"beside")
    beside.mask(400)
    short = Short(monkeypatch, "_fork", 1000)
    grammars._server._spare = None
    state = begun(grammars, "[a-f]{3}x", "regex")
    for _ in range(RESTARTS + 1):
        grammars.turn()
    assert isinstance(state.error, Unavailable)
    writes(beside, b"abcy")
    short.left = 0
    writes(begun(grammars, "[a-f]{3}x", "regex"), b"abcx")
