"""Tests that with drafts verified each kind of answer has the bits that it has without them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.abilities import internals_of
from baton.engine.backends.paced.runner import PacedRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.speculate.comparison import Tally
from baton.engine.speculate.draft import Speculator
from baton.engine.speculate.draft_model import DraftModel
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.heads.eagle3 import Eagle3
from baton.engine.speculate.heads.eagle3_layer import Eagle3Layer
from baton.engine.speculate.heads.files import HeadFiles, Target, packing
from baton.engine.speculate.heads.medusa import Medusa, read_medusa
from baton.engine.speculate.lookahead import Lookahead
from baton.engine.speculate.names import speculators
from baton.engine.steps.parts import EngineParts
from baton.kernels.abi import native
from baton.kv.pages.lease import PageLease
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling
from bench.windows import Tape
from tests.decode_worker.test_preemption import (
    DEMO,
    VOCAB,
    ClientAnswer,
    Engine,
    Run,
    Way,
    every,
    kinds,
    paced,
    prefilled,
    real,
    same,
    undisturbed,
)
from tests.engine.speculate.heads import published
from tests.engine.speculate.oracle import Bushy, Eager, Oracle
from tests.thorough import first_now


def drafted(engine: Engine, chance: float, seed: int = 0) -> Eager:
    """A drafter whose drafts are right by ``chance``."""
    answers = {name: told.tokens for name, told in undisturbed(engine)[0].items()}
    return Eager(Oracle(answers, chance, VOCAB, seed), seed=seed)


def exactly(found: dict[str, ClientAnswer], wanted: dict[str, ClientAnswer]) -> None:
    for name, told in found.items():
        assert told == wanted[name], name


LONG = pytest.mark.thorough
SHAPE: dict[str, int] = {"kv_bytes_per_token": 32, "vocab_size": 997, "max_model_len": 4096}


@pytest.mark.parametrize(
    ("engine", "chance"),
    [
        *((paced, chance) for chance in (0.0, 0.6, 1.0)),
        (real, 0.6),
        *(pytest.param(real, chance, marks=LONG) for chance in (0.0, 1.0)),
    ],
)
def test_drafts_change_no_bit_of_any_kind_of_answer(engine: object, chance: float) -> None:
    whole, _ = undisturbed(made := engine())  # type: ignore[operator]
    drafter = drafted(made, chance)
    (run := Run(made, drafter=drafter)).local()
    exactly(run.told(), whole)
    assert_counts(drafter.tally, chance)


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_trees_change_no_bit_of_any_kind_of_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    grafts, graft = list[int](), PageLease.graft
    monkeypatch.setattr(PageLease, "graft", lambda self, first, pages: grafts.append(graft(self, first, pages)))
    engine = real()
    whole, _ = undisturbed(engine)
    answers = {name: told.tokens for name, told in whole.items()}
    drafter = Eager(Bushy(answers, 0.7, VOCAB), most=20)
    (run := Run(engine, drafter=drafter)).local()
    exactly(run.told(), whole)
    assert 0 < drafter.tally.accepted < drafter.tally.verified
    (run := Run(engine, drafter=drafter)).local(7, 12)  # preempted on the way
    same(run.told(), whole, "trees, preempted")
    assert len(grafts) > 10, "branches that stood"


def assert_counts(tally: Tally, chance: float) -> None:
    assert tally.verified > 0
    assert (tally.accepted > 0) == (chance > 0)
    assert (tally.accepted < tally.verified) == (chance < 1)


@pytest.mark.parametrize("way", first_now([*Way], 2))
def test_preemption_between_drafts_changes_no_answer(way: Way) -> None:
    engine = paced()
    for at in every(engine)[::3]:
        run = Run(engine, way, drafted(engine, 0.6, seed=at))
        run.local(at)
        same(run.told(), undisturbed(engine)[0], f"drafted, preempted before step {at}: {way.value}")


LOOKED_UP = [
    (paced, "suffix"),  # whose answers don't repeat their prompts
    pytest.param(real, "suffix", marks=LONG),
    pytest.param(real, "prompt_lookup", marks=LONG),
]


@pytest.mark.parametrize(("engine", "name"), LOOKED_UP)
def test_what_is_looked_up_changes_no_bit_either(engine: object, name: str) -> None:
    whole, _ = undisturbed(made := engine())  # type: ignore[operator]
    [speculator] = speculators(name)
    drafter = Eager(speculator)  # a drafter that measures may find on a busy machine that none pays
    for _ in range(2):  # the second finds the first one's answers in the corpus
        (run := Run(made, drafter=drafter)).local()
        exactly(run.told(), whole)
    assert drafter.tally.verified > 0


@pytest.mark.soak
@pytest.mark.parametrize("way", Way)
def test_ten_thousand_answers_are_what_they_are_without_drafts(way: Way) -> None:
    engine, rng = paced(), random.Random(way.value)
    steps = every(engine)
    for seed in range(2500 // len(engine.requests) + 1):
        run = Run(engine, way, drafted(engine, rng.random(), seed))
        run.local(rng.choice(steps), rng.choice(steps))
        same(run.told(), undisturbed(engine)[0], f"drafted, seed {seed}, {way.value}")


def test_what_was_handed_over_goes_on_with_drafts() -> None:
    engine = paced()
    handed = prefilled(engine)
    (whole := Run(engine)).handed_over(handed)
    (run := Run(engine, drafter=drafted(engine, 0.7))).handed_over(handed)
    exactly(run.told(), whole.told())


def test_a_prompt_that_is_computed_here_is_read_for_drafts_meanwhile() -> None:
    now = [0.0]
    model = PacedRunner(
        "target",
        step_seconds=lambda shape: 1.0,
        sleep=lambda seconds: now.append(now[-1] + seconds),
        clock=lambda: now[-1],
        **SHAPE,
    )
    drafter, tape, pool = Drafter(speculators("auto"), lambda: now[-1]), Tape(), PagePool(600)
    model.bind(memoryview(bytearray(600 * model.spec.layout.page_bytes)), 600)
    parts = EngineParts.around(model, pool, tape, lambda: now[-1])
    loop = DecodeLoop(parts, DecodeLimits(chunk_tokens=256), random.Random(0).randbytes, drafter)
    prompt, few = tuple(at % 300 for at in range(2000)), Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    loop.take(ch.Admit(1, EngineRequest("here", prompt, len(prompt), few), True, 0.0))
    while loop.requests[1].first_at is None:
        loop.turn([])
    assert drafter.totals.read_ahead == 2000
    assert not loop.ahead._waiting, "steps of answers aren't lengthened by it"


@pytest.mark.parametrize("beside", [False, True])
def test_drafts_are_prepared_while_the_prompts_kv_is_on_its_way(beside: bool) -> None:
    """Checks that look-ups read within a share of the steps ``beside``; without any, every reader goes on."""
    now = [0.0]
    model, own = (
        PacedRunner(
            name,
            step_seconds=lambda shape: 1.0,
            sleep=lambda seconds: now.append(now[-1] + seconds),
            clock=lambda: now[-1],
            **SHAPE,
        )
        for name in ("target", "draft")
    )
    reading, pool = DraftModel(own, 256, lambda: now[-1]), PagePool(600)
    drafter, tape = Drafter([*speculators("auto"), reading], lambda: now[-1]), Tape()
    model.bind(memoryview(bytearray(600 * model.spec.layout.page_bytes)), 600)
    parts = EngineParts.around(model, pool, tape, lambda: now[-1])
    loop = DecodeLoop(parts, DecodeLimits(ttl_s=1e9), random.Random(0).randbytes, drafter)
    prompt = [at % 300 for at in range(2000)]
    plenty = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)
    if beside:
        loop.take(ch.Admit(1, EngineRequest("beside", (1, 2, 3), 3, plenty), True, 0.0))
    loop.take(ch.Admit(2, EngineRequest("coming", tuple(prompt), len(prompt), plenty), False, 0.0))
    for _ in range(100):
        if not loop.turn([]):
            break
    assert drafter.totals.read_ahead >= (1999 - 1 if beside else 2 * 1999 - 1)
    text = loop.requests[2].job.sequence
    lookup = drafter._speculators[0].propose(text, 4)
    assert lookup is not None
    assert list(lookup.tokens) == [200, 201, 202, 203]
    if not beside:
        assert len(reading._known[2]._kv) == 1999
        assert loop.turn([]) is False, "all of it was read"
        reading.prepare([text], 2)
        assert reading.propose(text, 2) is not None, "in the first call, whatever the prompt's length"
    loop.take(ch.Cancel(2, "gone"))
    assert not loop.ahead._waiting
    assert 2 not in reading._known


def test_a_draft_models_drafts_change_no_bit_and_its_own_twin_accepts_them() -> None:
    engine = real()
    drafter = Eager(DraftModel(load_runner(EngineConfig(str(DEMO), threads=1)), 256), most=3)
    (run := Run(engine, drafter=drafter)).local()
    exactly(run.told(), undisturbed(engine)[0])
    outputs = [output for message in run.tape if isinstance(message, ch.Tokens) for output in message.outputs]
    free = [one.run for one in outputs if engine.requests[one.key].sampling.grammar is None]  # the twin knows none
    stood = sum(one.accepted_drafts for one in free)
    assert stood > sum(one.rejected_drafts for one in free)  # one has an adapter, the twin none


def of_the_model(name: str, engine: Engine, directory: Path) -> Speculator:
    """A speculator that looks inside the model, or runs some of it."""
    inside, spec = internals_of(engine.runner), engine.runner.spec
    assert inside is not None
    if name == "self":
        return DraftModel(inside.shallow(3), 256)
    target, pack = Target(inside.hidden, spec.vocab_size, inside.layers), packing("float32", "none")
    if name == "medusa":
        published.medusa(directory, inside.hidden, spec.vocab_size)
        found: Medusa | Eagle3 = Medusa(read_medusa(str(directory), target, pack), inside.layers)
    else:
        published.eagle3(directory, inside.hidden, spec.vocab_size)
        found = Eagle3(Eagle3Layer(HeadFiles(str(directory)), target, inside.embeddings, pack), spec.vocab_size)
    inside.tap(found.layers, found.every_row)
    return found


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize(
    ("name", "trees"),
    [("self", False), ("medusa", True), ("eagle3", True), pytest.param("medusa", False, marks=LONG)],
)
def test_what_the_models_own_inside_drafts_changes_no_bit(name: str, trees: bool, tmp_path: Path) -> None:
    engine = real()
    whole, _ = undisturbed(engine)
    drafter = Eager(of_the_model(name, engine, tmp_path), most=3, trees=trees)
    (run := Run(engine, drafter=drafter)).local(9, 11)  # preempted on the way, so that states have gaps
    same(run.told(), whole, name)
    if (inside := internals_of(engine.runner)) is not None:
        inside.tap((), False)
    assert drafter.tally.verified > 50
    assert name != "self" or drafter.tally.accepted > 0
    for speculator in drafter._speculators:
        assert not speculator._known if hasattr(speculator, "_known") else not speculator._seen


def test_jacobi_iterations_change_no_bit() -> None:
    engine = paced()
    drafter = Eager(Lookahead(), most=5)
    (run := Run(engine, drafter=drafter)).local(9)
    same(run.told(), undisturbed(engine)[0], "lookahead")
    assert drafter.tally.verified > 100


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_by_rejection_greedy_answers_stay_the_same_and_sampled_drafts_stand_too() -> None:
    engine = real()
    whole, _ = undisturbed(engine)
    inside = internals_of(engine.runner)
    assert inside is not None
    stood = dict[bool, int]()
    for by_rejection in (False, True):
        drafter = Eager(DraftModel(inside.shallow(3), 256), most=3, by_rejection=by_rejection)
        (run := Run(engine, drafter=drafter)).local()
        for name, told in run.told().items():
            assert told == whole[name] or (by_rejection and kinds()[name][0].temperature), name
            assert len(told.tokens) == len(whole[name].tokens) or told.finish[0] == "stop"
        stood[by_rejection] = drafter.tally.accepted
    assert stood[True] > 0
