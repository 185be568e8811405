"""Grammars of running sequences: compiled beside the step loop, cached, advanced by each token that is taken.

Knows nothing of schedulers or logits. One thread compiles (the library drops the GIL), so a step never waits for
a grammar of another request; a sequence without its grammar yet sits a step out. State is a function of the
tokens emitted so far, so a handoff or a replay carries none: whoever goes on reads them again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from baton.engine.masks import Mask
from baton.engine.plan import ModelSpec
from baton.protos.errors import BatonError, InvalidRequest
from baton.protos.grammar import byte_tokenizer, compiled, require_quick, require_sound
from baton.protos.nouns import EngineRequest, Grammar

CACHED_GRAMMARS = 64
COMPILE_WAIT_S = 0.001


class Grammars:
    """Every grammar of one engine. ``tokenizer`` None: the model has none, and its low ids are bytes."""

    def __init__(
        self, spec: ModelSpec, tokenizer: Path | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._spec, self._path, self._clock = spec, tokenizer, clock
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def begin(self, request: EngineRequest) -> GrammarState | None:
        """Where ``request`` stands in its grammar, outputs emitted before included; None without one."""
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        return GrammarState(self._future(grammar), request.token_ids[request.prompt_tokens :], self._clock)

    @property
    def compiling(self) -> bool:
        """Whether some grammar is on its way."""
        return any(not future.done() for future in self._cache.values())

    def _future(self, grammar: Grammar) -> Future[LLMatcher]:
        found = self._cache.get(grammar)
        if found is None:
            found = self._cache[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(grammar)
        return found

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return compiled(grammar, self._tokenizer, self._clock)

    def _load(self) -> LLTokenizer:
        size = self._spec.vocab_size
        if self._path is None:
            return byte_tokenizer(size)
        ends = [token for token in self._spec.eos_token_ids if token < size]
        try:  # without an end token of its own the model gets one that it can't choose
            return LLTokenizer(str(self._path), n_vocab=size + (not ends), eos_token=ends or [size])
        except Exception as error:  # the library raises what its readers do
            raise InvalidRequest(f"this model's tokenizer can't follow a grammar: {error}", "grammar") from None


class GrammarState:
    """One sequence's place in its grammar. Used by the engine's one thread alone."""

    def __init__(self, base: Future[LLMatcher], emitted: Sequence[int], clock: Callable[[], float]) -> None:
        self._base, self._clock = base, clock
        self._waiting = list(emitted)
        self._matcher: LLMatcher | None = None
        self._error: BatonError | None = None

    @property
    def ready(self) -> bool:
        """Whether it can be asked without waiting."""
        return self._matcher is not None or self._base.done()

    @property
    def done(self) -> bool:
        """Whether the answer is complete: nothing may follow. An error shows in ``mask`` instead."""
        matcher = self._current()
        return matcher is not None and matcher.is_stopped()

    def take(self, token_id: int) -> None:
        """The token was emitted. Never raises: what it can't follow fails the sequence at its next ``mask``."""
        self._waiting.append(token_id)
        self._current()

    def mask(self, vocab_size: int) -> Mask:
        """Ids that may come now. Raises InvalidRequest for a grammar that can't be followed any further."""
        matcher = self._current()
        if matcher is None:
            assert self._error is not None
            raise self._error
        began = self._clock()
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        require_sound(matcher)
        require_quick(self._clock() - began)
        mask = np.unpackbits(bits, count=min(vocab_size, 8 * len(bits)), bitorder="little").astype(np.bool_)
        if not mask.any():
            raise InvalidRequest("the grammar allows no token of this model here", "grammar")
        return np.pad(mask, (0, vocab_size - len(mask)))

    def _current(self) -> LLMatcher | None:
        """The matcher after every token so far; None after an error."""
        if self._error is not None:
            return None
        try:
            if self._matcher is None:
                self._matcher = self._base.result().deep_copy()
            waiting, self._waiting = self._waiting, []
            self._matcher.consume_tokens(waiting)
            require_sound(self._matcher)
        except Exception as error:  # the compile's own, whatever it was, arrives here
            self._error = error if isinstance(error, BatonError) else BatonError(f"the grammar failed: {error}")
            return None
        return self._matcher
