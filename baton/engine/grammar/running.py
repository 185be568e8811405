"""Manages the grammars of running sequences, which child processes compile and follow token by token.

Knows nothing of schedulers or logits. The step loop never waits for a grammar longer than ``GRACE_S`` a step: a
sequence whose mask isn't there yet skips a step. State is a function of the tokens emitted so far, so a handoff, a
replay or a dead process loses none: the tokens are read again.
"""

from __future__ import annotations

import math
import select
import time
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from baton.engine.grammar.process import GrammarProcess
from baton.engine.grammar.state import GrammarState
from baton.engine.plan import ModelSpec
from baton.grammars.limits import COMPILING, TENANT_BYTES, TENANT_KEPT, TOTAL_BYTES, TOTAL_KEPT, ProcessBounds
from baton.grammars.messages import TokenizerSpec
from baton.grammars.server import server_for
from baton.grammars.turns import Turns
from baton.protos.nouns import EngineRequest, Grammar

COMPILE_WAIT_S = 0.001  # seconds until a loop looks again, while nobody computes and a grammar is being compiled
# Seconds that a step waits for the answers of all its grammars together; they take 0.1 ms if a core is idle.
GRACE_S = 0.002
_POLL_S = 0.05  # seconds between two checks of which grammar may compile, while a caller waits without limit


class Grammars:
    """Manages every grammar of one engine. Without a ``tokenizer`` file, token ids are taken as bytes.

    ``grace_s`` limits the seconds that a step waits for all grammars together; there is no limit by default, for
    callers without a step loop.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: Path | None = None,
        grace_s: float = math.inf,
        bounds: ProcessBounds = ProcessBounds(),
    ) -> None:
        ends = tuple(token for token in spec.eos_token_ids if token < spec.vocab_size)
        path, ends = ("", ()) if tokenizer is None else (str(tokenizer), ends)
        self._server = server_for(TokenizerSpec(path, spec.vocab_size, ends, bounds))
        self._processes: OrderedDict[tuple[bytes, Grammar], GrammarProcess] = OrderedDict()
        self._turns: Turns[GrammarProcess] = Turns(COMPILING)
        self._compiling: list[GrammarProcess] = []
        self._grace_s, self._until, self._previewed_until = grace_s, math.inf, math.inf

    def warm(self) -> None:
        """Starts a process in advance, so that the first grammar doesn't wait for the tokenizer to load."""
        self._server.warm()

    def begin(self, request: EngineRequest) -> GrammarState | None:
        """Returns the grammar state of ``request`` after its output tokens so far; None if it has no grammar."""
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        process = self._process(request.tenant_salt, grammar)
        state = GrammarState(self, process, request.token_ids[request.prompt_tokens :])
        self._feed((process,))
        return state

    @property
    def awaited(self) -> bool:
        """Returns whether a sequence waits for a grammar's answer."""
        return any(process.awaited for process in self._processes.values())

    def turn(self) -> None:
        """Processes the answers that have come; call it at the start of a step, whose limit for ``wait`` begins
        anew.
        """
        self._until = self._previewed_until = math.inf if math.isinf(self._grace_s) else -math.inf
        if self._processes:
            self._feed(self._processes.values())
            self._trim()

    def wait(self, state: GrammarState, for_ever: bool = False) -> None:
        """Waits until ``state`` is ready, at most for the rest of the step's ``grace_s`` seconds unless
        ``for_ever``.
        """
        if self._until == -math.inf:
            self._until = time.monotonic() + self._grace_s
        until = math.inf if for_ever else self._until
        self._feed((state.process,))
        while not state.ready and (left := until - time.monotonic()) > 0:
            processes = [state.process] if state.process.child is not None else self._compiling
            _poll(processes, min(left, _POLL_S))
            self._feed(tuple(processes))

    def wait_previewed(self, state: GrammarState) -> None:
        """Waits until all masks of ``state``'s preview are here, at most for ``grace_s`` seconds a step."""
        if self._previewed_until == -math.inf:
            self._previewed_until = time.monotonic() + self._grace_s
        while not state.has_previewed and (left := self._previewed_until - time.monotonic()) > 0:
            _poll((state.process,), min(left, _POLL_S))
            self._feed((state.process,))

    def _process(self, salt: bytes, grammar: Grammar) -> GrammarProcess:
        """Returns the tenant's own process, so that timing doesn't reveal whether another tenant uses the same
        grammar.
        """
        process = self._processes.get((salt, grammar))
        if process is None or process.broken:
            process = self._processes[salt, grammar] = GrammarProcess(salt, grammar, self._server)
        self._processes.move_to_end(process.key)
        return process

    def _feed(self, processes: Iterable[GrammarProcess]) -> None:
        for process in processes:
            if process.awaited or process.left:
                process.feed()
            if process.queued and not process.in_line:
                process.in_line = True
                self._turns.join(process.tenant, process)
        if self._compiling or len(self._turns):
            self._end_turns()
            self._begin_turns()

    def _end_turns(self) -> None:
        """Ends the turns of grammars that are compiled, and of those whose sequences have gone."""
        for process in [process for process in self._compiling if not process.compiling or not process.wanted]:
            self._compiling.remove(process)
            self._turns.leave(process.tenant, process)
            if process.compiling:
                self._drop(process)

    def _begin_turns(self) -> None:
        while (process := self._turns.next()) is not None:
            process.in_line = False
            if process.wanted:
                self._compiling.append(process)
                process.compile()
            else:
                self._turns.leave(process.tenant, process)
                self._drop(process)

    def _trim(self) -> None:
        """Drops processes beyond the limits: first within each tenant, and those without sequences before
        others.
        """
        tenants: dict[bytes, list[GrammarProcess]] = {}
        for process in self._processes.values():
            tenants.setdefault(process.tenant, []).append(process)
        for processes in tenants.values():
            self._bound(processes, TENANT_KEPT, TENANT_BYTES)
        self._bound([process for processes in tenants.values() for process in processes], TOTAL_KEPT, TOTAL_BYTES)

    def _bound(self, processes: list[GrammarProcess], kept: int, most: int) -> None:
        if len(processes) <= kept and sum(process.grown for process in processes) <= most:
            return
        idle = [process for process in processes if not process.wanted and process.key in self._processes]
        for process in idle:
            if len(idle) > kept or sum(h.grown for h in processes) > most:
                idle = idle[1:]
                self._drop(process)
        if sum(process.grown for process in processes) > most:
            max(processes, key=lambda process: process.grown).fail_large()

    def _drop(self, process: GrammarProcess) -> None:
        process.close()
        self._processes.pop(process.key, None)


def _poll(processes: Iterable[GrammarProcess], seconds: float) -> None:
    poller = select.poll()
    for process in processes:
        if process.child is not None:
            poller.register(process.child.socket, select.POLLIN)
    poller.poll(1000 * seconds)
