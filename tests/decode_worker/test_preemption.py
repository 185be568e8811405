"""Preempted at any step, in any way, each kind of answer is what it would have been undisturbed.

All kinds run together through the real loop and scheduler. At one step everything that runs is preempted; how its
KV comes back differs by ``Way``. The paced engine takes every step here; the real one a few, and all of them as a
thorough test.
"""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
import time
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.abilities import adapters_of
from baton.engine.adapters.reading import read_here
from baton.engine.adapters.table import AdapterTable
from baton.engine.backends.paced.adapters import PacedAdapters
from baton.engine.backends.paced.runner import PacedRunner
from baton.engine.config import EngineConfig
from baton.engine.grammar.running import Grammars
from baton.engine.load import load_runner
from baton.engine.plan import Runner
from baton.engine.speculate.drafter import Drafter
from baton.engine.steps.parts import EngineParts
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.channel import AdapterPlace
from baton.protos.nouns import AdapterLimits, EngineRequest, Grammar, Sampling, TokenLogprobs
from bench.windows import Tape
from tests.engine.adapters.adapter_files import write

DEMO = Path(__file__).parents[2] / "models" / "demo-draft"
PAGES, CHUNK = 640, 80  # a quarter of the pages' memory is what may be set aside
LONG = 200  # prompts that give something of their own are read in several steps
KV, VOCAB = 32, 997
ON_ADAPTER = "on an adapter"
NEARLY = 1e-4  # of logprobs and vectors: a row read in a chunk is summed in another order than one decoded alone


class Way(Enum):
    """Names the ways in which a preempted sequence's KV comes back."""

    KEPT = "what it wrote is still in the cache"
    EVICTED = "the cache was evicted: all is computed again"
    AHEAD = "another request left more of the prompt in the cache than it had read"
    SWAPPED = "it was set aside in host memory"


class ClientAnswer(NamedTuple):
    """Holds what a client gets of one answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: tuple[str, int | None]
    prompt: tuple[TokenLogprobs, ...]
    pooled: bytes


def kinds() -> dict[str, tuple[Sampling, int]]:
    """Every kind of answer, and its choice."""
    greedy = Sampling(temperature=0.0, max_tokens=9)
    drawn = msgspec.structs.replace(greedy, temperature=1.0, seed=11)
    with_ = msgspec.structs.replace
    regex = Grammar("regex", "[a-f]{3}(xyz)+[0-9]{2,5}!")
    lark = Grammar("grammar", 'start: "<call>" /[a-z]{4}/ "</call>"')
    schema = Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
    return {
        "greedy": (greedy, 0),
        "drawn": (with_(drawn, top_k=40, top_p=0.9, min_p=0.01), 0),
        "another choice": (drawn, 3),
        "logprobs": (with_(drawn, logprobs=3), 0),
        "penalties": (with_(drawn, presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3), 0),
        "bias": (with_(greedy, logit_bias={7: 30.0, 9: -100.0}, repetition_penalty=1.2), 0),
        "min_tokens": (with_(greedy, min_tokens=6, stop_token_ids=tuple(range(0, VOCAB, 2))), 0),
        "stop ids": (with_(greedy, stop_token_ids=tuple(range(0, VOCAB, 5)), max_tokens=30), 0),
        "bad words": (with_(drawn, bad_words=tuple((i, i + 1) for i in range(200))), 0),
        "allowed ids": (with_(drawn, allowed_token_ids=tuple(range(40, 90))), 0),
        "regex": (with_(drawn, grammar=regex, logprobs=1), 0),
        "schema": (with_(drawn, grammar=schema, max_tokens=14), 0),
        "tool call": (with_(greedy, grammar=lark), 0),
        "prompt logprobs": (with_(greedy, prompt_logprobs=2), 0),
        "echoed and scored": (with_(drawn, prompt_logprobs=0, logprobs=0), 0),
        "mean": (Sampling(temperature=0.0, max_tokens=1, pooling="mean"), 0),
        "last": (Sampling(temperature=0.0, max_tokens=1, pooling="last"), 0),
        ON_ADAPTER: (with_(greedy, logprobs=1), 0),
    }


class Engine:
    """One model for all runs: pages, pool and loop are new in each."""

    def __init__(self, runner: Runner, grammars: Grammars):
        self.runner, self.grammars = runner, grammars
        self.page_bytes = runner.spec.layout.page_bytes
        self.adapters = AdapterTable(adapters_of(runner), AdapterLimits(1, 1 << 30, 64))
        self.adapter = self._hold()
        self.requests = {key: self._request(key, name) for key, name in enumerate(kinds(), 1)}

    def _hold(self) -> str:
        """The id of an adapter that the runner holds."""
        host = adapters_of(self.runner)
        assert host is not None
        with tempfile.TemporaryDirectory() as directory:
            found = read_here(
                AdapterPlace("style", str(write(Path(directory), DEMO, ("q_proj", "v_proj")))), host.base
            )
        self.adapters.hold(found)
        return found.info.id

    def _request(self, key: int, name: str) -> EngineRequest:
        sampling, choice = kinds()[name]
        own = sampling.pooling or sampling.prompt_logprobs is not None
        prompt = random.Random(key).choices(range(3, VOCAB), k=LONG + key if own else 20 + key)
        adapter = self.adapter if name == ON_ADAPTER else ""
        return EngineRequest(name, tuple(prompt), len(prompt), sampling, choice, adapter)


class Run:
    """All kinds at once, from admission to the last token, preempted before step ``at``."""

    def __init__(self, engine: Engine, way: Way = Way.KEPT, drafter: Drafter | None = None) -> None:
        self.engine, self.way = engine, way
        self.memory = PageMemory.create(PAGES, engine.page_bytes)
        engine.runner.bind(self.memory.view(), PAGES)
        self.pool, self.tape = PagePool(PAGES), Tape()
        ids = itertools.count(1)
        self.loop = DecodeLoop(
            EngineParts.around(
                engine.runner,
                self.pool,
                self.tape,
                time.monotonic,
                engine.grammars,
                self.memory.view(),
                adapters=engine.adapters,
            ),
            DecodeLimits(max_batch=64, chunk_tokens=CHUNK),
            entropy=lambda n: next(ids).to_bytes(n, "big"),
            drafter=drafter,
        )
        assert self.loop.swap is not None
        self.loop.swap._cheaper = lambda size, tokens: way is Way.SWAPPED  # type: ignore[method-assign]

    def local(self, at: int | None = None, again: int | None = None) -> int:
        """Every request read and written here; how many steps that took."""
        for key, request in self.engine.requests.items():
            if self.way is Way.AHEAD:
                self._twin(key, request)
            self.loop.take(ch.Admit(key, request, True, 0.0))
        return self._steps({at, again} - {None})

    def handed_over(self, prefilled: dict[int, PrefilledPrompt], at: int | None = None) -> int:
        """Every prompt was read elsewhere."""
        for key, request in self.engine.requests.items():
            self.loop.take(ch.Admit(key, request, False, 0.0))
            self._deliver(self._answer_to(key), prefilled[key])
        return self._steps({at} - {None})

    def told(self) -> dict[str, ClientAnswer]:
        """Returns what each request's client got."""
        return {request.request_id: told(self.tape, key) for key, request in self.engine.requests.items()}

    def _twin(self, key: int, request: EngineRequest) -> None:
        """Sends the same prompt for somebody who reads it sooner, and wants no more than a token."""
        sooner = Sampling(temperature=0.0, max_tokens=1)
        twin = msgspec.structs.replace(request, request_id=f"twin {key}", sampling=sooner, priority=-1)
        self.loop.take(ch.Admit(1000 + key, twin, True, 0.0))

    def _deliver(self, admitted: ch.Admitted, handed: PrefilledPrompt) -> None:
        for page, content in zip(admitted.pages, handed.blocks, strict=True):
            self.memory.page(page)[:] = content
        key = admitted.key
        arrived = ch.BlocksReceived(key, 1, tuple(range(len(admitted.pages))))
        for message in (ch.ReceiveOpened(key, 1), arrived, ch.Commit(key, 1, handed.done.first, 0)):
            self.loop.take(message)
        self.loop.take(ch.ReceiveClosed(key, 1))

    def _answer_to(self, key: int) -> ch.Admitted:
        return next(m for m in self.tape if isinstance(m, ch.Admitted) and m.key == key)

    def _steps(self, disturbed: set[int | None]) -> int:
        steps = 0
        for decoding in (*self.loop.scheduler.running, *self.loop.scheduler.waiting):
            while not decoding.sequence.ready:  # a grammar compiles: steps are counted without it
                time.sleep(0.001)
                self.loop.parts.grammars.turn()
        while not self.loop.empty:
            if steps in disturbed:
                self._preempt()
            self.loop.turn([])
            steps += 1
            assert steps < 1000, "it doesn't end"
        self.pool.check()
        assert self.loop.snapshot().at_baseline
        assert self.loop.swap is not None
        assert self.loop.swap.used == 0
        assert not self.engine.adapters.listed(ch.ListAdapters(0)).adapters[0].running
        return steps

    def _preempt(self) -> None:
        for decoding in reversed(self.loop.scheduler.running[:]):
            self.loop.scheduler._preempt(decoding)
        if self.way in (Way.EVICTED, Way.SWAPPED):
            self.pool.open([], self.pool.available).close()


class PrefilledPrompt(NamedTuple):
    """A prompt that a prefill worker has read: its blocks' bytes, and what it said."""

    blocks: list[bytes]
    done: ch.PrefillDone


def prefilled(engine: Engine) -> dict[int, PrefilledPrompt]:
    """Every request's prompt, read by a prefill worker's loop."""
    memory, tape = PageMemory.create(PAGES, engine.page_bytes), Tape()
    engine.runner.bind(memory.view(), PAGES)
    parts = EngineParts.around(
        engine.runner, PagePool(PAGES), tape, time.monotonic, engine.grammars, adapters=engine.adapters
    )
    loop = PrefillLoop(parts, chunk_tokens=CHUNK, max_batch=64)
    for key, request in engine.requests.items():
        loop.take(ch.Prefill(key, request, 0, ()))
    while loop.scheduler.jobs:
        loop.turn([])
    done = {m.key: m for m in tape if isinstance(m, ch.PrefillDone)}
    assert set(done) == set(engine.requests), tape
    shipped = [(m.key, block) for m in tape if isinstance(m, ch.BlocksReady) for block in m.blocks]
    return {
        key: PrefilledPrompt(
            [bytes(memory.page(block.page)) for owner, block in shipped if owner == key], done[key]
        )
        for key in engine.requests
    }


def told(tape: list[Any], key: int) -> ClientAnswer:
    """Joined over its steps. What the prompt gave comes with the first output, or not at all."""
    outputs = [o for m in tape if isinstance(m, ch.Tokens) for o in m.outputs if o.key == key]
    errors = [m.error for m in tape if isinstance(m, (ch.Ended, ch.Refused)) and m.key == key]
    assert not errors, errors
    begins = itertools.accumulate((len(o.run.token_ids) for o in outputs[:-1]), initial=0)
    assert [o.run.output_index for o in outputs] == list(begins)
    assert not any(o.prompt_logprobs or o.pooled for o in outputs[1:])
    runs, first = [o.run for o in outputs], outputs[0]
    return ClientAnswer(
        tuple(token for run in runs for token in run.token_ids),
        tuple(one for run in runs for one in run.logprobs),
        (runs[-1].finish_reason, runs[-1].stop_token_id),
        first.prompt_logprobs,
        first.pooled,
    )


def same(found: dict[str, ClientAnswer], wanted: dict[str, ClientAnswer], when: str) -> None:
    """Tokens and ends exactly; likelihoods and vectors to what summing in another order costs."""
    for name, told in found.items():
        whole, of = wanted[name], f"{name}, {when}"
        assert (told.tokens, told.finish) == (whole.tokens, whole.finish), of
        for field in ("logprobs", "prompt"):
            mine, theirs = getattr(told, field), getattr(whole, field)
            assert [one.chosen.token_id for one in mine] == [one.chosen.token_id for one in theirs], of
            assert likelihoods(mine) == pytest.approx(likelihoods(theirs), abs=NEARLY), of
        assert vector(told) == pytest.approx(vector(whole), abs=NEARLY), of


def likelihoods(scores: tuple[TokenLogprobs, ...]) -> list[float]:
    return [one.logprob for score in scores for one in (score.chosen, *score.top)]


def vector(told: ClientAnswer) -> Any:
    return np.frombuffer(told.pooled, "<f4")


@functools.cache
def paced() -> Engine:
    spec: dict[str, Any] = {"kv_bytes_per_token": KV, "vocab_size": VOCAB, "max_model_len": 4096}
    adapters = PacedAdapters(max_rank=64, max_bytes=1 << 30)
    runner = PacedRunner("test", step_seconds=lambda s: 0.0, adapters=adapters, **spec)
    return Engine(runner, Grammars(runner.spec))


@functools.cache
def real() -> Engine:
    runner = load_runner(EngineConfig(str(DEMO), threads=1, adapters=AdapterLimits(1, 1 << 30, 64)))
    return Engine(runner, Grammars(runner.spec, DEMO / "tokenizer.json"))


@functools.cache
def undisturbed(engine: Engine) -> tuple[dict[str, ClientAnswer], int]:
    """Returns what every request is told if nothing is preempted, and the number of steps."""
    steps = (run := Run(engine)).local()
    return run.told(), steps


def disturbed(engine: Engine, way: Way, steps: Iterable[int], two: bool = False) -> None:
    """Preempts before each of ``steps``, one run each (``two``: and again soon), against the undisturbed run."""
    whole, _ = undisturbed(engine)
    for at in steps:
        (run := Run(engine, way)).local(at, at + 2 if two else None)
        assert run.loop.scheduler.preemptions > 0
        assert (run.loop.swap.saved > 0) == (way is Way.SWAPPED)  # type: ignore[union-attr]
        same(run.told(), whole, f"preempted before step {at}: {way.value}")


def disturbed_after_handoff(engine: Engine, way: Way, steps: Iterable[int]) -> None:
    """Plays the same where a prefill worker has read the prompts."""
    handed = prefilled(engine)
    (whole := Run(engine)).handed_over(handed)
    for at in steps:
        (run := Run(engine, way)).handed_over(handed, at)
        same(run.told(), whole.told(), f"handed over, preempted before step {at}: {way.value}")


def every(engine: Engine) -> range:
    """Steps before which something runs and something is missing."""
    return range(1, undisturbed(engine)[1])


@pytest.mark.parametrize("way", Way)
def test_a_preemption_changes_no_answer_of_the_paced_engine(way: Way) -> None:
    first = list(Way).index(way) % 2  # every second step, and the others of the next way
    disturbed(paced(), way, every(paced())[first::2])
    disturbed_after_handoff(paced(), way, range(first, 30, 6))


@pytest.mark.parametrize("way", Way)
def test_a_preemption_changes_no_answer_of_the_real_engine(way: Way) -> None:
    disturbed(real(), way, [every(real())[-1] // 2], two=True)


@pytest.mark.thorough
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("way", Way)
def test_no_preemption_at_any_step_changes_an_answer(way: Way, two: bool) -> None:
    disturbed(real(), way, every(real()), two)
    disturbed(paced(), way, every(paced()), two)
    if not two:
        disturbed_after_handoff(real(), way, range(30))


def test_what_a_prefill_worker_read_is_answered_as_what_was_read_here() -> None:
    here, handed = undisturbed(paced())[0], prefilled(paced())
    (there := Run(paced())).handed_over(handed)
    given = {paced().requests[key].request_id: h.done for key, h in handed.items()}
    told = {
        name: told._replace(prompt=given[name].prompt_logprobs, pooled=given[name].pooled)
        for name, told in there.told().items()
    }
    same(told, here, "read by a prefill worker")
