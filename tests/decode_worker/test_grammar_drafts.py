"""Answers within grammars are drafted too: the same bits as without drafts, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from baton.engine.grammar.running import Grammars
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.forced import ForcedDrafts
from baton.engine.speculate.suffix import Suffix
from baton.kernels.abi import native
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Grammar, Sampling
from tests.decode_worker.test_preemption import VOCAB, Engine, Run, Way, paced, prefilled, real, same
from tests.engine.speculate.oracle import Eager, Oracle

CHOICES = 3
NATIVE = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
ENGINES = [paced, pytest.param(real, marks=NATIVE)]


def constrained(engine: Engine) -> Engine:
    """Leaves ``engine`` the kinds of requests that have a grammar, each with several choices."""
    asked = [one for one in engine.requests.values() if one.sampling.grammar is not None]
    each = [
        msgspec.structs.replace(one, request_id=f"{one.request_id} {choice}", choice=choice)
        for one in asked
        for choice in range(CHOICES)
    ]
    engine.requests = dict(enumerate(each, 1))
    return engine


def right(run: Run, chance: float, seed: int = 0) -> Drafter:
    """A drafter whose drafts are what ``run`` was told, each token by ``chance``."""
    answers = {name: answer.tokens for name, answer in run.told().items()}
    return Eager(Oracle(answers, chance, VOCAB, seed), seed=seed)


def accepted(run: Run) -> dict[int, int]:
    """Returns each request's drafts that were accepted."""
    found = dict.fromkeys(run.engine.requests, 0)
    for message in run.tape:
        for output in message.outputs if isinstance(message, ch.Tokens) else ():
            found[output.key] += output.run.accepted_drafts
    return found


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made: Callable[[], Engine] = request.param
    kept = dict((engine := made()).requests)
    yield constrained(engine)
    engine.requests = kept


@pytest.mark.parametrize("chance", [0.7, 1.0])
def test_each_kind_of_grammar_gets_drafts_that_change_no_bit(engine: Engine, chance: float) -> None:
    (plain := Run(engine)).local()
    (drafted := Run(engine, drafter=right(plain, chance))).local()
    assert drafted.told() == plain.told()
    assert all(accepted(drafted).values())


@pytest.mark.parametrize("way", [Way.KEPT, Way.EVICTED])
def test_they_go_on_with_drafts_after_preemptions(engine: Engine, way: Way) -> None:
    (plain := Run(engine)).local()
    (drafted := Run(engine, way, right(plain, 0.7))).local(3, 5)
    same(drafted.told(), plain.told(), "grammars, drafted and preempted")
    assert sum(accepted(drafted).values()) > 0


def test_they_go_on_with_drafts_elsewhere(engine: Engine) -> None:
    handed = prefilled(engine)
    (plain := Run(engine)).handed_over(handed)
    (drafted := Run(engine, drafter=right(plain, 0.7))).handed_over(handed)
    assert drafted.told() == plain.told()
    assert sum(accepted(drafted).values()) > 0


def test_drafts_whose_masks_come_too_late_do_not_stand(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (plain := Run(engine)).local()
    monkeypatch.setattr(Grammars, "wait_previewed", lambda *_: None)
    (drafted := Run(engine, drafter=right(plain, 1.0))).local()
    assert drafted.told() == plain.told()


def asked(monkeypatch: pytest.MonkeyPatch, kind: str, spec: str) -> Engine:
    """The paced engine with a single request, within this grammar."""
    sampling = Sampling(temperature=0.0, max_tokens=60, grammar=Grammar(kind, spec))
    one = EngineRequest("one", tuple(range(3, 30)), 27, sampling)
    monkeypatch.setattr(engine := paced(), "requests", {1: one})
    return engine


def test_what_a_grammar_forces_takes_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = asked(monkeypatch, "regex", "[ab]this follows[cd]and this[ef]")
    steps = (plain := Run(engine)).local()
    drafter = Eager(ForcedDrafts(), most=16)
    fewer = (drafted := Run(engine, drafter=drafter)).local()
    assert drafted.told() == plain.told()
    assert drafter.tally.accepted == drafter.tally.verified > 15
    assert fewer < steps // 2


def test_recent_answers_are_looked_up_for_answers_of_the_same_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = asked(monkeypatch, "choice", '["first of all", "first of two", "first of three"]')
    drafter = Eager(Suffix(), most=16)
    (plain := Run(engine)).local()
    for _ in range(2):
        (drafted := Run(engine, drafter=drafter)).local()
        assert drafted.told() == plain.told()
    assert drafter.tally.accepted > 5


def test_nobody_follows_the_grammar_of_an_answer_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = asked(monkeypatch, "regex", "[ab]and its end[cd]")
    (run := Run(engine, drafter=(drafter := Eager(ForcedDrafts(), most=16)))).local()
    assert run.told()
    assert drafter._ended, "it waits to be forgotten"
    assert [one.wanted for (_, of), one in engine.grammars._processes.items() if "its end" in of.spec] == [False]
