"""Decode loops in virtual time: speculation can't be felt where it doesn't help, and helps where text copies."""

from __future__ import annotations

import pytest

from baton.engine.speculate.allowance import LAST_ANSWERS, OWN_PROVEN, Allowance
from baton.engine.speculate.draft import Draft, SequenceView, Speculator
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.names import AUTO, speculators
from tests.engine.speculate.texts import Written
from tests.engine.speculate.world import (
    CALL_S,
    Clock,
    Costly,
    Known,
    Machine,
    Played,
    Text,
    copied,
    flat,
    gentle,
    misleading,
    new,
    p99,
    play,
    sloped,
    stairs,
)
from tests.thorough import first_now, later

MACHINES = (flat, sloped, stairs)


def played(
    machine: Machine,
    kinds: tuple[Text, ...],
    batch: int,
    steps: int = 600,
    seed: int = 0,
    call_s: float = CALL_S,
) -> Played:
    clock = Clock()
    drafter = Drafter([Costly(one, clock, call_s) for one in speculators(AUTO)], clock, trees=True)
    return play(drafter, clock, machine, kinds, batch, steps, seed)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", [new, misleading])
@pytest.mark.parametrize("batch", [1, later(2), later(8), later(32), 64])
def test_text_that_does_not_repeat_is_written_as_without_speculation(
    machine: Machine, kind: Text, batch: int
) -> None:
    found = played(machine, (kind,), batch, 400 if batch > 2 else 800)
    assert found.rate >= 0.99
    assert sum(step > 1.02 for step in found.steps) == 0, "no step is felt, from a new worker's first on"
    assert max(map(max, found.clients.values())) < 1.02


@pytest.mark.parametrize("seed", first_now(range(3)))
def test_luck_lengthens_no_step_in_a_hundred_of_a_long_misleading_run(seed: int) -> None:
    for machine in MACHINES:
        found = played(machine, (misleading,), 1, 4000, seed)
        assert p99(found.steps) < 1.02
        assert found.rate >= 0.98


@pytest.mark.parametrize(("machine", "batch", "least"), [(flat, 1, 3.0), (sloped, 1, 2.0), later(sloped, 8, 1.15)])
def test_text_that_copies_is_written_faster(machine: Machine, batch: int, least: float) -> None:
    assert played(machine, (copied,), batch).rate >= least


def test_text_that_copies_gains_also_where_calls_for_drafts_are_felt_and_few() -> None:
    assert played(flat, (copied,), 1, call_s=5 * CALL_S).rate >= 2.0


def test_one_call_tells_that_drafts_pay() -> None:
    """A draft of 16 tokens that all stand; of one or two of them, as a step would verify, nobody could be sure."""
    clock, answer = Clock(), list(range(100, 160))
    drafter, text = Drafter([Once(answer)], clock), Written(1, answer[:1])
    for _ in range(20):
        assert not drafter.plan([text]), "nothing is verified before it is known to pay"
        drafter.observe(1, 0, flat(1))
        text.tokens.append(answer[len(text.tokens)])
    drafter.end(text)
    assert drafter.tally.proposed == 1
    assert drafter._allowance._earned > 3.0, "one step's drafts would bring less than one"


class Once(Speculator):
    """Proposes the answer's next tokens, once."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        at, answer = len(text.tokens), self._answer
        self._answer = []
        return Draft(answer[at : at + budget], "once", 0) if answer else None

    def end(self, text: SequenceView) -> None:
        """Does nothing, because nothing is remembered."""


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", [new, misleading])
def test_calls_that_are_felt_are_fewer_than_a_99th_percentile_sees(kind: Text, machine: Machine) -> None:
    """Checks that felt calls lengthen far fewer steps than the hundredth beyond a 99th percentile."""
    found = played(machine, (kind,), 1, 3000, call_s=5 * CALL_S)
    assert sum(step > 1.01 for step in found.steps) < 0.003 * len(found.steps)


@pytest.mark.parametrize("machine", [later(flat), sloped, later(stairs)])
def test_a_client_whose_text_misleads_feels_nothing_of_those_before_whose_texts_copied(machine: Machine) -> None:
    """Texts that copy and texts that mislead take turns, so that the worker's own experience is of both."""
    found = played(machine, (copied, misleading), 1, 3000)
    felt = [one > 1.02 for one in found.clients[misleading]]
    assert len(felt) > 8
    assert sum(felt) <= len(felt) // 8
    assert found.rate > 1.15


def test_beside_texts_that_copy_a_client_waits_a_quarter_longer_at_most() -> None:
    found = played(sloped, (copied, misleading), 8, 600)
    late = found.clients[misleading][8:]
    assert late
    assert sum(one > 1.3 for one in late) <= len(late) // 8
    assert found.rate > 1.0


@pytest.mark.parametrize("machine", [flat, sloped, later(stairs)])
def test_where_rows_cost_too_much_copying_text_loses_no_more_than_what_it_takes_to_learn_that(
    machine: Machine,
) -> None:
    found = played(machine, (copied,), 64, 400)
    assert found.rate >= 0.98
    assert sum(step > 1.1 for step in found.steps) < 20


def test_a_new_answer_is_trusted_where_those_before_it_paid_and_no_longer_once_it_lost_that() -> None:
    allowance = Allowance()
    assert not allowance.trusts(0)
    for seq in range(LAST_ANSWERS):
        allowance.settle(seq, OWN_PROVEN, 1)
        allowance.end(seq)
    assert allowance.trusts(20), "at once"
    allowance.settle(20, -0.4, 1)
    assert allowance.trusts(20), "a little luck"
    allowance.settle(20, -0.7, 1)
    assert not allowance.trusts(20)
    allowance.failed(21)
    assert not allowance.trusts(21), "its first draft, which was watched, brought nothing"
    for seq in range(30, 36):
        allowance.failed(seq)
        allowance.end(seq)
    assert not allowance.trusts(40)


def test_drafts_that_are_only_watched_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what watched drafts of distrusted sequences would bring as if they had brought it.

    Else nobody would be asked any more: the draft of one in a batch, which is asked now and then, never pays alone.
    """
    clock, known = Clock(), Known(0.6)
    drafter = Drafter([Costly(known, clock)], clock)
    play(drafter, clock, gentle, (known.text,), 8, 200)
    assert drafter._allowance.is_proven
    monkeypatch.setattr(drafter, "_is_trusted", lambda text: False)
    before, known = drafter.tally.proposed, Known(0.6)
    drafter._speculators = drafter._proposals._speculators = [Costly(known, clock)]
    play(drafter, clock, gentle, (known.text,), 8, 200)
    assert drafter.tally.proposed - before > 200 * 8 / 4
