"""Grammars of simulated engines: which ids may come depends on the grammar's text and on every token before.

In place of ``engine.grammar.running``, whose grammars are followed in processes of their own. As there, an answer
may be late: a sequence isn't ready until its grammar was compiled, or has heard of the last token. A state that
was carried over wrongly allows other ids, and the answer is no longer the oracle's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from baton.protos.nouns import EngineRequest, Grammar

SHARE = 7  # one id of so many is allowed
COMPILE_S = 0.05  # seconds that a grammar compiles at most
LATE_S = 0.004  # seconds that the word on a token takes at most
LATE_ONE_IN = 8  # of so many tokens, one is late


class GrammarCourse:
    """Follows one answer through its grammar, in the engine's place."""

    def __init__(self, grammar: Grammar) -> None:
        self._state = xxhash.xxh3_64_intdigest(grammar.spec.encode())
        self._left = 2 + self._state % 30

    @property
    def done(self) -> bool:
        """Returns whether nothing may follow."""
        return self._left <= 0

    def take(self, token: int) -> None:
        """Goes on by a token."""
        self._state = xxhash.xxh3_64_intdigest(self._state.to_bytes(8, "little") + token.to_bytes(8, "little"))
        self._left -= 1

    def mask(self, vocabulary: int) -> NDArray[np.bool_]:
        """Returns which ids may come, (vocabulary,) bool."""
        return (np.arange(vocabulary) + self._state % SHARE) % SHARE == 0


def follow(grammar: Grammar | None) -> GrammarCourse | None:
    """Returns the beginning of a grammar, or None without one."""
    return None if grammar is None else GrammarCourse(grammar)


class Waits(NamedTuple):
    """Holds what a state waits by: the clock in seconds, and delays from the seed."""

    clock: Callable[[], float]
    rng: random.Random


class SimulatedGrammar:
    """One sequence's grammar, as the engine follows it."""

    error = None

    def __init__(self, request: EngineRequest, grammar: Grammar, waits: Waits) -> None:
        self._waits, self._course = waits, GrammarCourse(grammar)
        for token in request.token_ids[request.prompt_tokens :]:
            self._course.take(token)
        self._ready_at = waits.clock() + waits.rng.uniform(0.0, COMPILE_S)
        self._told_ahead = False

    @property
    def ready(self) -> bool:
        """Tells whether it can be asked without waiting."""
        return self._waits.clock() >= self._ready_at

    @property
    def done(self) -> bool:
        """Tells whether the answer is complete; False too while it isn't ready."""
        return self.ready and self._course.done

    def tell_ahead(self, token_id: int) -> None:
        """Goes on by a token that ``take`` will repeat."""
        self.take(token_id)
        self._told_ahead = True

    def take(self, token_id: int) -> None:
        """Goes on by a token."""
        if self._told_ahead:
            self._told_ahead = False
            return
        self._course.take(token_id)
        if self._waits.rng.randrange(LATE_ONE_IN) == 0:
            self._ready_at = self._waits.clock() + self._waits.rng.uniform(0.0, LATE_S)

    def mask(self, vocab_size: int) -> NDArray[np.bool_]:
        """Returns which ids may come, (vocab_size,) bool."""
        assert self.ready, "a sequence that isn't ready is not computed"
        return self._course.mask(vocab_size)


class SimulatedGrammars:
    """The grammars of one engine."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._begun: list[SimulatedGrammar] = []

    @property
    def awaited(self) -> bool:
        """Tells whether some grammar's answer is on its way."""
        self._begun = [one for one in self._begun if not one.ready]
        return bool(self._begun)

    def begin(self, request: EngineRequest) -> SimulatedGrammar | None:
        """Returns where a request stands in its grammar; None without one."""
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        self._begun.append(found := SimulatedGrammar(request, grammar, self._waits))
        return found

    def turn(self) -> None:
        """Does nothing: answers come by the clock."""
