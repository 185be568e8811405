"""Simulated grammars for structured output: the allowed token ids follow from the grammar's text and all tokens so
far.

They take the place of ``engine.grammar.running``, which follows grammars in other processes. As there, a result may
be late: a sequence isn't ready until its grammar is compiled or its last token processed. If a grammar's state is
carried over wrongly, other ids are allowed, and the answer differs from the oracle's.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from baton.protos.nouns import EngineRequest, Grammar

CHECK_S = 0.05  # seconds that the check of a grammar before its request takes at most
SHARE = 7  # one id of so many is allowed
COMPILE_S = 0.05  # seconds that a grammar compiles at most
LATE_S = 0.004  # seconds that the word on a token takes at most
LATE_ONE_IN = 8  # of so many tokens, one is late
JSON = "json_schema"  # the kind of grammar whose answers are JSON
FREE, DIGITS = b"#", frozenset(b"0123456789")  # the first stands for one of the second
ARGUMENTS = b'{"at": [##, #]}'
CALLS = b'[{"name": "look", "parameters": {"at": [#]}}, {"name": "go", "parameters": {"to": "#", "by": ##}}]'


class GrammarAutomaton:
    """The state of a grammar after some tokens of one answer; the engine and the oracle both compute it this
    way.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._state = xxhash.xxh3_64_intdigest(grammar.spec.encode())
        self._left = 2 + self._state % 30

    @property
    def done(self) -> bool:
        """Returns whether the answer is complete, so that no token may follow."""
        return self._left <= 0

    @property
    def forced(self) -> Sequence[int]:
        """Returns ids that alone may follow, one after the other; here always several may."""
        return ()

    def take(self, token: int) -> None:
        """Advances the state by ``token``."""
        self._state = xxhash.xxh3_64_intdigest(self._state.to_bytes(8, "little") + token.to_bytes(8, "little"))
        self._left -= 1

    def mask(self, vocabulary: int) -> NDArray[np.bool_]:
        """Returns the allowed next ids as a (``vocabulary``,) bool array."""
        return (np.arange(vocabulary) + self._state % SHARE) % SHARE == 0

    def allows(self, token: int) -> bool:
        """Returns whether ``token`` may come next."""
        return (token + self._state % SHARE) % SHARE == 0

    def after(self, token: int) -> GrammarAutomaton:
        """Returns a copy of the state, advanced by ``token``."""
        found = copy(self)
        found.take(token)
        return found


class JsonAutomaton(GrammarAutomaton):
    """The state of a JSON schema after some tokens of one answer, one per byte: an object, or a list of two calls.

    Of the schema itself it only matters whether it is a list's. Digits are free.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._text, self._at = CALLS if lists(grammar) else ARGUMENTS, 0

    @property
    def done(self) -> bool:
        """Returns whether the JSON text is whole."""
        return self._at >= len(self._text)

    @property
    def forced(self) -> Sequence[int]:
        """Returns the ids up to the next digit."""
        return list(self._text[self._at :].partition(FREE)[0])

    def take(self, token: int) -> None:
        """Advances by one byte."""
        self._at += 1

    def mask(self, vocabulary: int) -> NDArray[np.bool_]:
        """Returns the allowed next ids as a (``vocabulary``,) bool array: of one byte, or of the digits."""
        found = np.zeros(vocabulary, np.bool_)
        found[[token for token in range(256) if self.allows(token)]] = True
        return found

    def allows(self, token: int) -> bool:
        """Returns whether ``token`` may come next."""
        wanted = self._text[self._at]
        return token in DIGITS if wanted == FREE[0] else token == wanted


def lists(grammar: Grammar) -> bool:
    """Returns whether ``grammar``, a JSON schema, is a list's."""
    return bool(json.loads(grammar.spec).get("type") == "array")


def alike(a: Grammar | None, b: Grammar | None) -> bool:
    """Returns whether two grammars allow the same answers here; JSON schemas may be worded otherwise."""
    if a is None or b is None or a.kind != JSON or b.kind != JSON:
        return a == b
    return lists(a) == lists(b)


def follow(grammar: Grammar | None) -> GrammarAutomaton | None:
    """Returns the initial state of ``grammar``; None if that is None."""
    if grammar is None:
        return None
    return JsonAutomaton(grammar) if grammar.kind == JSON else GrammarAutomaton(grammar)


class GrammarDelays(NamedTuple):
    """The clock (seconds) and the random generator by which a simulated grammar's results are delayed."""

    clock: Callable[[], float]
    rng: random.Random


class SimulatedGrammar:
    """The grammar of one sequence, with the interface that the engine expects; results come after random delays."""

    error = None
    follows_drafts = True

    def __init__(self, request: EngineRequest, grammar: Grammar, waits: GrammarDelays) -> None:
        course = follow(grammar)
        assert course is not None
        self._waits, self._course = waits, course
        for token in request.token_ids[request.prompt_tokens :]:
            self._course.take(token)
        self._ready_at = waits.clock() + waits.rng.uniform(0.0, COMPILE_S)
        self._told_ahead = 0
        self._courses: list[GrammarAutomaton] = []  # after each previewed draft that may be accepted

    @property
    def ready(self) -> bool:
        """Returns whether the grammar's state is up to date, so that ``mask`` may be called."""
        return self._waits.clock() >= self._ready_at

    @property
    def forced(self) -> Sequence[int]:
        """Returns ids that alone may follow, one after the other; none while the grammar isn't ready."""
        return self._course.forced if self.ready and not self._told_ahead else ()

    @property
    def done(self) -> bool:
        """Returns whether the answer is complete; False while the grammar isn't ready."""
        return not self._told_ahead and self.ready and self._course.done

    def tell_ahead(self, token_ids: Sequence[int]) -> None:
        """Advances the grammar by tokens before ``take`` reports the same tokens, which then has no effect."""
        for token in token_ids:
            self.take(token)
        self._told_ahead = len(token_ids)

    def take(self, token_id: int) -> None:
        """Advances the grammar by ``token_id``, unless ``tell_ahead`` did; in one of LATE_ONE_IN calls it isn't
        ready for a moment.
        """
        if self._told_ahead:
            self._told_ahead -= 1
            return
        self._course.take(token_id)
        if self._waits.rng.randrange(LATE_ONE_IN) == 0:
            self._ready_at = self._waits.clock() + self._waits.rng.uniform(0.0, LATE_S)

    def mask(self, vocab_size: int) -> NDArray[np.bool_]:
        """Returns the allowed next ids as a (``vocab_size``,) bool array. Asserts that the grammar is ready."""
        assert self.ready, "a sequence that isn't ready is not computed"
        return self._course.mask(vocab_size)

    @property
    def followed(self) -> int:
        """Returns how many of the previewed drafts may be accepted."""
        return len(self._courses)

    def preview(self, ids: Sequence[int]) -> None:
        """Follows the drafts ``ids``, up to the first that isn't allowed or that completes the answer."""
        self._courses, course = [], self._course
        for token in ids:
            allowed, course = course.allows(token), course.after(token)
            if not allowed or course.done:
                return
            self._courses.append(course)

    def mask_after(self, count: int, vocab_size: int) -> NDArray[np.bool_]:
        """Returns the ids that may follow ``count`` previewed drafts, all if one of them may not be accepted."""
        if count > len(self._courses):
            return np.ones(vocab_size, np.bool_)
        return self._courses[count - 1].mask(vocab_size)


class SimulatedGrammars:
    """Makes the grammars of one simulated engine's sequences."""

    def __init__(self, waits: GrammarDelays) -> None:
        self._waits = waits
        self._begun: list[SimulatedGrammar] = []

    @property
    def awaited(self) -> bool:
        """Returns whether any grammar is not ready, because its result is delayed."""
        self._begun = [one for one in self._begun if not one.ready]
        return bool(self._begun)

    def begin(self, request: EngineRequest) -> SimulatedGrammar | None:
        """Returns the grammar of ``request``, advanced by the output tokens that it already has; None if it has no
        grammar.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        self._begun.append(found := SimulatedGrammar(request, grammar, self._waits))
        return found

    def turn(self) -> None:
        """Does nothing: simulated results arrive by the clock."""


class SimulatedCheck:
    """Takes the place of the router's check of grammars before dispatch; it finds every grammar good."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def check(self, grammar: Grammar, param: str, tenant: str = "", salt: bytes = b"") -> None:
        """Returns after at most CHECK_S seconds."""
        await asyncio.sleep(self._rng.uniform(0.0, CHECK_S))
