"""Common preparation of every generating API surface: a call is checked, tokenized, charged and made a Generation.

Knows nothing of REST or gRPC; ``stream`` makes the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile

import msgspec

from baton.protos.errors import DeadlineExceeded, InvalidRequest
from baton.protos.nouns import Grammar, Sampling
from baton.router.access.caller import CALLER
from baton.router.answer.generation import Generation, GenerationOptions
from baton.router.answer.grammar_check import GrammarCheck
from baton.router.answer.metering import Metering
from baton.router.answer.quotas import Quotas
from baton.router.answer.validate import (
    Limits,
    check_n,
    check_prompt,
    check_sampling,
    check_stops,
    check_words,
    resolve_sampling,
)
from baton.router.request.environment import Environment
from baton.router.request.request import ServingBackend
from baton.router.text.catalog import ModelCatalog, ModelEntry
from baton.router.text.room import long_chars

LEAST_DETOKENIZED = 32_768  # ids in one detokenize call, or as many as the model's context holds if those are more
LATE = (
    "the request was still being read, tokenized or checked at its deadline: its own timeout, or "
    "router.request_timeout_s"
)
CHARS_PER_TOKEN = 4  # of text, to estimate a tokenizer call's cost before it is tokenized


class ParserNames(msgspec.Struct, frozen=True):
    """Names the parsers of chat answers, as file names in ``tool_parsers`` and ``reasoning_parsers``; "auto" picks
    by model.
    """

    tools: str = "auto"
    reasoning: str = "auto"


class GenerationService(msgspec.Struct, frozen=True):
    """Prepares the calls of all generating surfaces: holds dispatch, models and limits, and what checks, charges
    and meters a call.
    """

    serving: ServingBackend
    catalog: ModelCatalog
    limits: Limits
    environment: Environment
    grammars: GrammarCheck
    quotas: Quotas
    metering: Metering
    parsers: ParserNames = ParserNames()

    def deadline(self, timeout_s: float | None = None) -> float:
        """Returns a deadline in seconds of the monotonic clock: after ``timeout_s``, at most after
        ``request_timeout_s``.
        """
        most = self.limits.request_timeout_s
        return self.environment.clock() + (most if timeout_s is None else max(0.0, min(timeout_s, most)))

    async def prepare(
        self,
        entry: ModelEntry,
        options: GenerationOptions,
        read_prompts: Callable[[], Awaitable[Sequence[Sequence[int]]]],
    ) -> Generation:
        """Checks the options, then tokenizes and checks the prompts, then charges the caller's key; returns the
        Generation.

        ``read_prompts`` tokenizes: it returns token ids per prompt. Raises InvalidRequest, ContextTooLong,
        Forbidden, QuotaExceeded, DeadlineExceeded if that takes longer than the options' deadline allows, and
        Overloaded or Unavailable if a grammar can't be checked now.
        """
        async with self.within(options.context.deadline):
            generation = await self._prepared(entry, options, read_prompts)
        if (deadline := options.context.deadline) is not None and self.environment.clock() >= deadline:
            raise DeadlineExceeded(LATE)  # before anything is charged for it
        await self.quotas.charge(generation)
        return generation

    @asynccontextmanager
    async def within(self, deadline: float | None) -> AsyncIterator[None]:
        """Runs the block until ``deadline`` at most, in seconds of the monotonic clock; None sets no bound.

        Raises DeadlineExceeded if it isn't over by then.
        """
        bound = asyncio.timeout(None if deadline is None else max(0.0, deadline - self.environment.clock()))
        try:
            async with bound:
                yield
        except TimeoutError:
            if not bound.expired():
                raise
            raise DeadlineExceeded(LATE) from None

    async def _prepared(
        self,
        entry: ModelEntry,
        options: GenerationOptions,
        read_prompts: Callable[[], Awaitable[Sequence[Sequence[int]]]],
    ) -> Generation:
        arrived = self.environment.clock()
        check_n(options.n, self.limits)
        check_stops(options.stops, self.limits, options.names.get("stop", "stop"))
        check_sampling(options.sampling, entry, options.names)
        options = await self._with_words(entry, options)
        await self._check_grammar(options)
        prompts = await self._prompts(entry, options, read_prompts)
        caller = CALLER.get()
        request_id, samplings = (
            caller.request_id or self.environment.new_id(),
            self._samplings(entry, options, prompts),
        )
        context = msgspec.structs.replace(options.context.of_caller(caller), adapter_id=entry.adapter_id)
        prediction = await self._prediction(entry, options)
        return Generation(request_id, entry, options, prompts, samplings, arrived, context, prediction)

    async def _check_grammar(self, options: GenerationOptions) -> None:
        if "grammar" in options.sampling:
            param, salt = options.names.get("grammar", "grammar"), options.context.tenant_salt
            await self.check_grammar(options.sampling["grammar"], param, salt)

    async def check_grammar(self, grammar: Grammar, param: str, tenant_salt: bytes) -> None:
        """Returns if the caller's ``grammar`` compiles. Raises as ``GrammarCheck.check``, naming ``param``."""
        caller = CALLER.get()
        await self.grammars.check(grammar, param, caller.tenant, caller.salted(tenant_salt))

    async def _prompts(
        self,
        entry: ModelEntry,
        options: GenerationOptions,
        read_prompts: Callable[[], Awaitable[Sequence[Sequence[int]]]],
    ) -> tuple[tuple[int, ...], ...]:
        read = await read_prompts()
        most = max(self.limits.max_prompts, self.limits.max_n)
        if len(read) * options.n > most:
            text = f"{len(read)} prompts of n {options.n} are over {most} choices: send fewer"
            raise InvalidRequest(text, "n")
        for ids in read:
            check_prompt(ids, entry, options.names.get("prompt", "prompt"))
        return tuple(map(tuple, read))

    def _samplings(
        self, entry: ModelEntry, options: GenerationOptions, prompts: Sequence[Sequence[int]]
    ) -> tuple[Sampling, ...]:
        """Returns the sampling of each prompt; without a seed of the client's each gets its own, so that equal
        prompts of a batch differ.
        """
        given, most, names = options.sampling, options.default_max_tokens, options.names
        return tuple(
            resolve_sampling(given, entry, len(ids), most, self.environment.new_seed(), names) for ids in prompts
        )

    async def _prediction(self, entry: ModelEntry, options: GenerationOptions) -> tuple[int, ...]:
        """The expected answer as tokens: no more than the model's context holds, up to one that it can't write."""
        if not options.prediction:
            return ()
        said = options.prediction[: long_chars(entry.max_model_len)]
        ids = await self.catalog.text(entry).encode(said, add_special_tokens=False)
        return tuple(takewhile(lambda i: i < entry.vocab_size, ids[: entry.max_model_len]))

    async def _with_words(self, entry: ModelEntry, options: GenerationOptions) -> GenerationOptions:
        """``options`` with its bad words as tokens, each as it reads at the start of a text and after a space."""
        if not options.bad_words:
            return options
        check_words(options.bad_words)
        text = self.catalog.text(entry)
        forms = [form for word in options.bad_words for form in (word, f" {word.lstrip()}")]
        words = {tuple(await text.encode(form, add_special_tokens=False)) for form in forms}
        sampling = options.sampling | {"bad_words": tuple(sorted(words - {()}))}
        return msgspec.structs.replace(options, sampling=sampling)
