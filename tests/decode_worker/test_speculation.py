"""With drafts verified, each kind of answer has the bits that it has without."""

from __future__ import annotations

import random

import pytest

from baton.engine.load import EngineConfig, load_runner
from baton.engine.speculate.draft_model import DraftModel
from baton.engine.speculate.drafter import Drafter, Tally
from baton.engine.speculate.names import speculators
from tests.decode_worker.test_preemption import (
    DEMO,
    VOCAB,
    Engine,
    Run,
    Told,
    Way,
    every,
    paced,
    prefilled,
    real,
    same,
    undisturbed,
)
from tests.engine.speculate.oracle import Eager, Oracle


def drafted(engine: Engine, chance: float, seed: int = 0) -> Eager:
    """A drafter whose drafts are right by ``chance``."""
    answers = {name: told.tokens for name, told in undisturbed(engine)[0].items()}
    return Eager(Oracle(answers, chance, VOCAB, seed), seed=seed)


def exactly(found: dict[str, Told], wanted: dict[str, Told]) -> None:
    for name, told in found.items():
        assert told == wanted[name], name


LONG = pytest.mark.thorough


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


def assert_counts(tally: Tally, chance: float) -> None:
    assert tally.verified > 0
    assert (tally.accepted > 0) == (chance > 0)
    assert (tally.accepted < tally.verified) == (chance < 1)


@pytest.mark.parametrize("way", Way)
def test_preemption_between_drafts_changes_no_answer(way: Way) -> None:
    engine = paced()
    for at in every(engine)[::3]:
        run = Run(engine, way, drafted(engine, 0.6, seed=at))
        run.local(at)
        same(run.told(), undisturbed(engine)[0], f"drafted, preempted before step {at}: {way.value}")


@pytest.mark.parametrize("engine", [paced, pytest.param(real, marks=LONG)])
def test_what_is_looked_up_changes_no_bit_either(engine: object) -> None:
    whole, _ = undisturbed(made := engine())  # type: ignore[operator]
    drafter = Drafter(speculators("auto+suffix"))
    for _ in range(2):  # the second finds the first one's answers in the corpus
        (run := Run(made, drafter=drafter)).local()
        exactly(run.told(), whole)
    assert drafter.tally.proposed > 0


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


def test_a_draft_models_drafts_change_no_bit_and_its_own_twin_accepts_them() -> None:
    engine = real()
    drafter = Eager(DraftModel(load_runner(EngineConfig(str(DEMO), threads=1)), 256), most=3)
    (run := Run(engine, drafter=drafter)).local()
    exactly(run.told(), undisturbed(engine)[0])
    assert drafter.tally.accepted > 0.5 * drafter.tally.verified > 0  # one has an adapter, the twin none
