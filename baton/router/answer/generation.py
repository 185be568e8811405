"""One client call, validated: what a surface hands to ``answer.py``.

Knows nothing of REST or gRPC; ``Frontend`` turns what either of them was given into a ``Generation``.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from baton.cluster.advice import AdviceStore
from baton.cluster.batch_store import BatchStore
from baton.cluster.holds import HeldRoster
from baton.cluster.telemetry import RouterMetrics
from baton.protos.errors import BatonError, InvalidRequest
from baton.protos.nouns import Sampling
from baton.router.access.caller import CALLER, NOBODY, Caller
from baton.router.access.gate import Gate
from baton.router.answer.grammar_check import GrammarCheck
from baton.router.answer.metering import Meter, NoMeter
from baton.router.answer.validate import (
    Limits,
    check_n,
    check_prompt,
    check_sampling,
    check_stops,
    check_words,
    resolve_sampling,
)
from baton.router.dispatch.role_control import RoleControl
from baton.router.observe.decisions import DecisionLog
from baton.router.observe.overview import Overview
from baton.router.observe.recorder import TraceRecorder
from baton.router.observe.tallies import Tallies
from baton.router.request.request import ChoiceStream, RouterRequest, ServingBackend
from baton.router.request.weights import WeightsPin
from baton.router.text.catalog import ModelCatalog, ModelEntry

Exposition = Callable[[str], Awaitable[tuple[bytes, str]]]  # of an Accept header: the metrics, and their type
LEAST_DETOKENIZED = 32_768  # ids in one call, or as many as the model's context holds
CHARS_PER_TOKEN = 4
# Tokens that count as one: clients count before they ask, and a worker's work is another than a tokenizer's.
TOKENIZER_SHARE = 16
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class GenerationOptions(msgspec.Struct, frozen=True):
    """What a client asked for, its ranges not yet checked.

    ``sampling`` holds the fields that were given; ``default_max_tokens`` None fills the context; ``names`` renames
    fields in errors. ``continues``: the answer's text continues the prompt's (no chat turn between them).
    ``prompt_only``: the one token that is written is not wanted. ``session``: the body's name of the conversation;
    a header's goes before it. ``prediction``: the answer that the client expects.
    """

    sampling: dict[str, Any]
    n: int = 1
    stops: tuple[str, ...] = ()
    default_max_tokens: int | None = None
    names: dict[str, str] = {}
    adapter_id: str = ""
    include_stop: bool = False
    skip_special: bool = True
    continues: bool = True
    tenant_salt: bytes = b""
    priority: int = 0
    deadline: float | None = None
    traceparent: str = ""
    bad_words: tuple[str, ...] = ()
    prompt_only: bool = False
    session: str = ""
    prediction: str = ""


class Generation(msgspec.Struct, frozen=True):
    """A call, every default filled in. ``samplings[i]`` is for ``prompts[i]``; each gets ``options.n`` answers."""

    request_id: str
    entry: ModelEntry
    options: GenerationOptions
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    arrived: float = 0.0
    caller: Caller = NOBODY
    prediction: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(map(len, self.prompts))

    def requests(self) -> list[RouterRequest]:
        """One per prompt; all are answered on the same weights."""
        pin = WeightsPin()
        return [self._request(i, pin) for i in range(len(self.prompts))]

    def _request(self, i: int, pin: WeightsPin) -> RouterRequest:
        return RouterRequest(
            request_id=self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{i}",
            model_id=self.entry.model_id,
            token_ids=self.prompts[i],
            sampling=self.samplings[i],
            adapter_id=self.options.adapter_id,
            n=self.options.n,
            tenant_salt=self.caller.salted(self.options.tenant_salt),
            priority=self.caller.priority(self.options.priority),
            deadline=self.options.deadline,
            traceparent=self.options.traceparent,
            asked_id=self.caller.asked_id,
            key=self.caller.key,
            slo_ttft_s=self.caller.slo_ttft_s,
            slo_tpot_s=self.caller.slo_tpot_s,
            session=self.caller.session or self.options.session,
            prediction=self.prediction,
            pin=pin,
        )


class Formats(msgspec.Struct, frozen=True):
    """Which parsers read chat answers, by file name in ``tool_parsers`` and ``reasoning_parsers``."""

    tools: str = "auto"
    reasoning: str = "auto"


def _no_class(prompt_tokens: int) -> str:
    """Where no classes are configured."""
    return ""


class Frontend(msgspec.Struct, frozen=True):
    """What both surfaces share. ``clock`` in monotonic seconds; ``entropy`` makes ids and seeds.

    ``tallies``: where answers are counted; None where nobody wants to know. ``class_of`` names the context class of
    a prompt's length, for requests that are refused before dispatch has classed them.
    """

    serving: ServingBackend
    catalog: ModelCatalog
    limits: Limits
    metrics: RouterMetrics
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    entropy: Callable[[int], bytes]
    grammars: GrammarCheck = msgspec.field(default_factory=GrammarCheck)
    formats: Formats = Formats()
    batches: BatchStore | None = None
    gate: Gate = msgspec.field(default_factory=Gate)
    decisions: DecisionLog | None = None
    exposition: Exposition | None = None
    recorder: TraceRecorder | None = None
    roles: RoleControl | None = None
    advice: AdviceStore | None = None
    overview: Overview | None = None
    holds: HeldRoster | None = None
    tallies: Tallies | None = None
    class_of: Callable[[int], str] = _no_class

    def new_id(self) -> str:
        """Unique; a caller's own id is only echoed, since two calls may carry the same."""
        return self.entropy(12).hex()

    def deadline(self, timeout_s: float | None = None) -> float:
        """On ``clock``: the caller's timeout, the configured one at most."""
        most = self.limits.request_timeout_s
        return self.clock() + (most if timeout_s is None else max(0.0, min(timeout_s, most)))

    async def prepare(
        self,
        entry: ModelEntry,
        options: GenerationOptions,
        read_prompts: Callable[[], Awaitable[Sequence[Sequence[int]]]],
    ) -> Generation:
        """Check the cheap things, then tokenize and check the prompts. Raises InvalidRequest, ModelNotFound."""
        arrived = self.clock()
        entry.require_adapter(options.adapter_id)
        check_n(options.n, self.limits)
        check_stops(options.stops, self.limits)
        check_sampling(options.sampling, entry, options.names)
        options = await self._with_words(entry, options)
        if "grammar" in options.sampling:
            caller, param = CALLER.get(), options.names.get("grammar", "grammar")
            salt = caller.salted(options.tenant_salt)
            await self.grammars.check(options.sampling["grammar"], param, caller.tenant, salt)
        read = await read_prompts()
        most = max(self.limits.max_prompts, self.limits.max_n)
        if len(read) * options.n > most:
            raise InvalidRequest(f"{len(read)} prompts of n {options.n} are over {most} choices: send fewer", "n")
        for ids in read:
            check_prompt(ids, entry, options.names.get("prompt", "prompt"))
        prompts = tuple(map(tuple, read))
        caller = CALLER.get()
        request_id, samplings = caller.request_id or self.new_id(), self._samplings(entry, options, prompts)
        prediction = await self._prediction(entry, options)
        generation = Generation(request_id, entry, options, prompts, samplings, arrived, caller, prediction)
        await self._charge(generation)
        return generation

    async def _charge(self, generation: Generation) -> None:
        """Count it against the caller's key. Raises Forbidden, QuotaExceeded; the records keep why."""
        caller, requests = generation.caller, len(generation.prompts) * generation.options.n
        try:
            await self.gate.charge(caller, generation.entry.model_id, requests, generation.prompt_tokens)
        except BatonError as error:
            self.metrics.refused.labels(error.label).inc()
            if self.decisions is not None:
                for request in generation.requests():
                    self.decisions.refused(request, self.class_of(len(request.token_ids)), error)
            raise

    def meter(self, generation: Generation, stream: ChoiceStream, prompt: int = 0) -> Meter | NoMeter:
        """For one choice of ``generation.prompts[prompt]``."""
        if self.tallies is None:
            return NoMeter()
        return Meter(
            self.tallies,
            generation.arrived,
            generation.entry.model_id,
            stream.summary,
            stream.choice == 0,
            generation.prompts[prompt],
            generation.request_id if len(generation.prompts) == 1 else f"{generation.request_id}-{prompt}",
        )

    def _samplings(
        self, entry: ModelEntry, options: GenerationOptions, prompts: Sequence[Sequence[int]]
    ) -> tuple[Sampling, ...]:
        """Without a seed of the client's, each prompt gets its own: equal prompts of a batch then differ."""
        given, most, names = options.sampling, options.default_max_tokens, options.names
        return tuple(resolve_sampling(given, entry, len(ids), most, self._seed(), names) for ids in prompts)

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

    async def _prediction(self, entry: ModelEntry, options: GenerationOptions) -> tuple[int, ...]:
        """The expected answer as tokens: no more than the model's context holds."""
        if not options.prediction:
            return ()
        ids = await self.catalog.text(entry).encode(options.prediction, add_special_tokens=False)
        return tuple(ids[: entry.max_model_len])

    def _seed(self) -> int:
        return int.from_bytes(self.entropy(8), "little")


def clean_traceparent(text: str | None) -> str:
    """A W3C traceparent that can be passed on; empty for none or a malformed one."""
    return text if text and _TRACEPARENT.fullmatch(text) else ""


def clean_request_id(text: str | None) -> str:
    """A caller's id that can be logged and echoed; empty for none or an odd one."""
    return text if text and _REQUEST_ID.fullmatch(text) else ""


async def charge_tokenizer(frontend: Frontend, entry: ModelEntry, tokens: int) -> None:
    """Count a call of the tokenizer against the caller's rates. Raises Forbidden, QuotaExceeded."""
    await frontend.gate.charge(CALLER.get(), entry.model_id, 1, tokens // TOKENIZER_SHARE)
