"""Answers of every kind, with drafts of every kind, preempted and killed at random, are what they are without.

A few dozen here; ``make identity`` asks for 10,000 (or BATON_IDENTITY of them, from seed BATON_IDENTITY_SEED on)
and says how many were compared.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import pytest

from baton.engine.abilities import internals_of
from baton.engine.speculate.draft import Speculator
from baton.engine.speculate.draft_model import DraftModel
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.lookahead import Lookahead
from baton.engine.speculate.prompt_lookup import PromptLookup
from baton.engine.speculate.suffix import Suffix
from baton.kernels.abi import native
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, TokenLogprobs
from tests.decode_worker.test_preemption import NEARLY, VOCAB, Engine, Run, Way, kinds, likelihoods, real
from tests.engine.speculate.oracle import Bushy, Eager, Oracle

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
LONGEST_S = 250.0  # of a round, whose grammars may have to be compiled
AT_ONCE = 20  # requests of a round
PREEMPTED, KILLED = 0.1, 0.02  # chances before each step


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    finish: tuple[str, int | None]
    logprobs: tuple[TokenLogprobs, ...]


class Lives:
    """One engine after the other: what is killed goes on elsewhere behind the tokens that it had told."""

    def __init__(self, engine: Engine, requests: dict[int, EngineRequest], drafter: Drafter | None) -> None:
        self._engine, self._requests, self._drafter = engine, requests, drafter
        self._told: dict[int, list[ch.Output]] = {key: [] for key in requests}
        self.kills = self.preemptions = 0
        self._run = self._begun()

    def answers(self, rng: random.Random | None) -> dict[int, Answer]:
        """Returns each request's answer; ``rng`` draws which sequences are preempted and which engines killed."""
        deadline = time.monotonic() + LONGEST_S
        while not self._run.loop.empty:
            assert time.monotonic() < deadline, "it doesn't end"
            if rng is not None:
                self._disturb(rng)
            self._run.loop.turn([])
        self._listen()
        self._run.pool.check()
        assert self._run.loop.snapshot().at_baseline
        return {key: _joined(outputs) for key, outputs in self._told.items()}

    def _begun(self) -> Run:
        run = Run(self._engine, Way.KEPT, self._drafter)
        for key, request in self._requests.items():
            told = tuple(token for output in self._told[key] for token in output.run.token_ids)
            if not self._told[key] or not self._told[key][-1].run.finish_reason:
                again = msgspec.structs.replace(request, token_ids=request.token_ids + told)
                run.loop.take(ch.Admit(key, again, True, 0.0))
        return run

    def _disturb(self, rng: random.Random) -> None:
        scheduler = self._run.loop.scheduler
        if len(scheduler.running) > 1 and rng.random() < PREEMPTED:
            scheduler._preempt(rng.choice(scheduler.running[1:]))
            self.preemptions += 1
        if rng.random() < KILLED:
            self._listen()
            for key in list(self._run.loop.requests):  # adapters and grammars are the runner's, and outlive a loop
                self._run.loop.take(ch.Cancel(key, "killed"))
            self._run, self.kills = self._begun(), self.kills + 1

    def _listen(self) -> None:
        for message in self._run.tape:
            assert not isinstance(message, ch.Refused)
            assert not getattr(message, "error", None)
            for output in message.outputs if isinstance(message, ch.Tokens) else ():
                self._told[output.key].append(output)


def _joined(outputs: list[ch.Output]) -> Answer:
    runs, tokens = [output.run for output in outputs], list[int]()
    for run in runs:
        assert run.output_index == len(tokens)
        tokens += run.token_ids
    finish = runs[-1].finish_reason, runs[-1].stop_token_id
    return Answer(tuple(tokens), finish, tuple(one for run in runs for one in run.logprobs))


def asked(engine: Engine, rng: random.Random, first: int) -> dict[int, EngineRequest]:
    """Requests of random kinds, whose prompts repeat themselves with some edits; now and then several choices."""
    found, names = dict[int, EngineRequest](), list(kinds())
    while len(found) < AT_ONCE:
        sampling, choice = kinds()[rng.choice(names)]
        if not sampling.pooling:
            sampling = msgspec.structs.replace(sampling, seed=rng.getrandbits(32), max_tokens=rng.randint(1, 30))
        phrase = rng.choices(range(3, VOCAB), k=rng.randint(3, 12))
        prompt = [token if rng.random() < 0.95 else rng.randrange(3, VOCAB) for token in phrase * rng.randint(2, 6)]
        adapter = engine.adapter if rng.random() < 0.1 else ""
        for each in range(choice, choice + (3 if rng.random() < 0.1 else 1)):
            key = first + len(found)
            found[key] = EngineRequest(f"r{key}", tuple(prompt), len(prompt), sampling, each, adapter)
    return found


def speculators(
    engine: Engine, plain: dict[int, Answer], requests: dict[int, EngineRequest], seed: int
) -> Speculator:
    """One kind of speculator after the other."""
    answers = {request.request_id: plain[key].tokens for key, request in requests.items()}
    inside = internals_of(engine.runner)
    assert inside is not None
    shallow = inside.shallow
    made = (
        lambda: Bushy(answers, 0.7, VOCAB, seed),
        PromptLookup,
        lambda: Oracle(answers, 0.6, VOCAB, seed),
        Suffix,
        lambda: DraftModel(shallow(3), 256),
        Lookahead,
    )
    return made[seed % len(made)]()


def compared(seeds: Iterable[int]) -> tuple[int, int, int, int]:
    """Answers that were compared, drafts that stood, preemptions and kills."""
    engine, totals = real(), [0, 0, 0, 0]
    for seed in seeds:
        rng = random.Random(seed)
        requests = asked(engine, rng, 1)
        plain = Lives(engine, requests, None).answers(None)
        drafter = Eager(speculators(engine, plain, requests, seed), most=rng.randint(2, 16), seed=seed, trees=True)
        lives = Lives(engine, requests, drafter)
        found = lives.answers(rng if rng.random() < 0.5 else None)
        for key, answer in found.items():
            told = f"seed {seed}: {requests[key]}"
            assert answer[:2] == plain[key][:2], told
            if lives.kills or lives.preemptions:  # a row read in a chunk is summed in another order
                assert likelihoods(answer.logprobs) == pytest.approx(
                    likelihoods(plain[key].logprobs), abs=NEARLY
                ), told
            else:
                assert answer == plain[key], told
        for at, count in enumerate((len(found), drafter.tally.accepted, lives.preemptions, lives.kills)):
            totals[at] += count
    return totals[0], totals[1], totals[2], totals[3]


def test_some_answers_are_what_they_are_without_drafts() -> None:
    answers, stood, _, _ = compared(range(3))
    assert answers >= 3 * AT_ONCE
    assert stood > 20


@pytest.mark.soak
def test_ten_thousand_answers_of_the_real_engine_are_what_they_are_without_drafts() -> None:
    wanted = int(os.environ.get("BATON_IDENTITY", "10000"))
    first = int(os.environ.get("BATON_IDENTITY_SEED", "100"))
    answers, stood, preemptions, kills = compared(range(first, first + -(-wanted // AT_ONCE)))
    told = f"{answers} answers, {stood} drafts stood, {preemptions} preemptions, {kills} kills: the same"
    print(f"from seed {first}: {told}")
    assert answers >= wanted
    assert min(stood, preemptions, kills) > 0 or wanted < 1000
