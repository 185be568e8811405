"""Keeps the grammars of running sequences: compiled and followed in processes beside the engine, token by token.

Knows nothing of schedulers or logits. The step loop never waits for a grammar longer than ``GRACE_S`` a step: a
sequence whose mask isn't there yet sits a step out. State is a function of the tokens emitted so far, so a handoff,
a replay and a process that died lose none: whoever goes on reads them again.
"""

from __future__ import annotations

import math
import select
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from baton.engine.grammar.process import GrammarProcess
from baton.engine.masks import Mask
from baton.engine.plan import ModelSpec
from baton.grammars.limits import COMPILING, TENANT_BYTES, TENANT_KEPT, TOTAL_BYTES, TOTAL_KEPT, ProcessBounds
from baton.grammars.messages import NextMask, TokenizerSpec
from baton.grammars.server import server_for
from baton.grammars.turns import Turns
from baton.protos.errors import BatonError, InvalidRequest
from baton.protos.nouns import EngineRequest, Grammar

COMPILE_WAIT_S = 0.001
# Seconds that a step waits for the answers of all its grammars together; they take 0.1 ms beside an idle core.
GRACE_S = 0.002
_POLL_S = 0.05  # seconds between two looks at who may compile now, where a caller waits for ever


class Grammars:
    """Keeps every grammar of one engine. Without a ``tokenizer`` the model's low ids are bytes.

    ``grace_s`` is what a step waits for all grammars together; it is endless by default, for a caller without a
    step loop.
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
        self._grace_s, self._until = grace_s, math.inf

    def warm(self) -> None:
        """Prepares a process, so that the first grammar doesn't wait for the tokenizer."""
        self._server.warm()

    def begin(self, request: EngineRequest) -> GrammarState | None:
        """Returns where ``request`` stands in its grammar, outputs emitted before included; None without a
        grammar.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        process = self._process(request.tenant_salt, grammar)
        state = GrammarState(self, process, request.token_ids[request.prompt_tokens :])
        self._feed((process,))
        return state

    @property
    def awaited(self) -> bool:
        """Tells whether some grammar's answer is on its way."""
        return any(process.awaited for process in self._processes.values())

    def turn(self) -> None:
        """Takes the answers that have come, at the start of a step, from which on the grace of ``wait``
        counts anew.
        """
        self._until = math.inf if math.isinf(self._grace_s) else -math.inf
        if self._processes:
            self._feed(self._processes.values())
            self._trim()

    def wait(self, state: GrammarState, for_ever: bool = False) -> None:
        """Returns when ``state`` is ready, or when this step has waited long enough."""
        if self._until == -math.inf:
            self._until = time.monotonic() + self._grace_s
        until = math.inf if for_ever else self._until
        self._feed((state.process,))
        while not state.ready and (left := until - time.monotonic()) > 0:
            processes = [state.process] if state.process.child is not None else self._compiling
            _poll(processes, min(left, _POLL_S))
            self._feed(tuple(processes))

    def _process(self, salt: bytes, grammar: Grammar) -> GrammarProcess:
        """A tenant's own: whether another tenant has asked for the same grammar shows in nobody's times."""
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
        """Those that are compiled, and those whose clients left."""
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
        """Lets go of what is kept beyond the bounds: a tenant's own first, what nobody follows before the rest."""
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
            max(processes, key=lambda process: process.grown).fail(
                InvalidRequest(self._server.bounds.exceeded, "grammar")
            )

    def _drop(self, process: GrammarProcess) -> None:
        process.close()
        self._processes.pop(process.key, None)


class GrammarState:
    """Follows one sequence through its grammar. It is used by the engine's one thread alone."""

    def __init__(self, grammars: Grammars, process: GrammarProcess, emitted: Sequence[int]) -> None:
        self._grammars, self.process = grammars, process
        self.tokens = list(emitted)
        self._at: NextMask | None = None
        self._error: BatonError | None = None
        self._told_ahead = False
        self._seq = process.join(self)

    @property
    def ready(self) -> bool:
        """Tells whether it can be asked without waiting: what it says of every token so far is there."""
        return self.error is not None or (self._at is not None and self._at.taken == len(self.tokens))

    @property
    def error(self) -> BatonError | None:
        """Returns why the grammar can't be followed, or None."""
        return self._error or self.process.error

    @property
    def done(self) -> bool:
        """Tells whether the answer is complete, so that nothing may follow; False too where the step's grace ended
        first.

        An error shows in ``mask`` instead.
        """
        if not self.ready:
            self._grammars.wait(self)
        return self.ready and self.error is None and self._at is not None and self._at.stopped

    def tell_ahead(self, token_id: int) -> None:
        """Advances by a token that ``take`` will repeat, so that many sequences' grammars work beside each
        other.
        """
        self.take(token_id)
        self._told_ahead = True

    def take(self, token_id: int) -> None:
        """Advances by an emitted token. Never raises: what can't be followed fails the sequence at its next
        ``mask``.
        """
        if self._told_ahead:
            self._told_ahead = False
            assert self.tokens[-1] == token_id, "another token than was told ahead"
            return
        self.tokens.append(token_id)
        if self.error is None:
            self.process.ask(self._seq, (token_id,))

    def mask(self, vocab_size: int) -> Mask:
        """Returns which ids may come now, (vocab_size,). Raises InvalidRequest where the grammar can't be followed
        further.
        """
        self._grammars.wait(self, for_ever=True)
        if self.error is not None:
            raise self.error
        assert self._at is not None
        bits = np.frombuffer(self._at.mask, np.uint8)
        mask = np.unpackbits(bits, count=min(vocab_size, 8 * len(bits)), bitorder="little").astype(np.bool_)
        if not mask.any():
            raise InvalidRequest("the grammar allows no token of this model here", "grammar")
        return np.pad(mask, (0, vocab_size - len(mask)))

    def arrived(self, at: NextMask) -> None:
        """Takes where it stands after some of its tokens; answers to those after them are on their way."""
        self._at = at
        if at.error:
            self.fail(InvalidRequest(at.error, "grammar"))

    def fail(self, error: BatonError) -> None:
        """Records that it can't be followed any further."""
        self._error = error


def _poll(processes: Iterable[GrammarProcess], seconds: float) -> None:
    poller = select.poll()
    for process in processes:
        if process.child is not None:
            poller.register(process.child.socket, select.POLLIN)
    poller.poll(1000 * seconds)
