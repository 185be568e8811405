"""Operators of a simulated cluster who change roles at several routers at once, and drain workers."""

from __future__ import annotations

import msgspec
import pytest

from baton.drill.draw import draw
from baton.drill.parts.operators import workers as worker_operators
from baton.drill.run import play
from baton.drill.scenario import TWICE, Fault, Request, Scenario
from baton.protos.nouns import Sampling
from tests.drill.test_roles import QUIET
from tests.thorough import first_now

LONG = Sampling(temperature=0.0, max_tokens=100, ignore_eos=True)


def operated(*faults: Fault, prefill: int = 3, decode: int = 1, requests: tuple[Request, ...] = ()) -> Scenario:
    """A cluster of two routers, of which nothing is asked but what operators want."""
    drawn = draw(1, msgspec.structs.replace(QUIET, requests=1))
    plain = {"prefill": prefill, "decode": decode, "routers": 2, "batches": (), "controller": False, "pages": 300}
    return msgspec.structs.replace(drawn, requests=requests, faults=faults, **plain)


def asked_for_ratios(*ratios: int, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """Operators ask routers in turn for so many prefill workers of four, all at once."""
    wanted = iter(ratios)
    monkeypatch.setattr(worker_operators, "drawn_ratio", lambda rng, count: (n := next(wanted), count - n))
    faults = (Fault("ratio", 1.0 + 0.001 * i, "decode-0", asks=i % 2) for i in range(len(ratios)))
    return operated(*faults)


def test_operators_who_ask_two_routers_for_ratios_at_once_both_get_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = play(asked_for_ratios(1, 2, monkeypatch=monkeypatch), keep_story=True)
    assert verdict.held, verdict.violations
    told = [line for line in verdict.lines if "has the ratio" in line]
    assert len(told) == 2, verdict.lines


def test_who_asks_for_the_role_of_a_worker_that_is_held_hears_that_it_has_changed() -> None:
    faults = Fault("hold", 0.5, "prefill-0", seconds=40.0), Fault("role", 2.0, "prefill-0", seconds=0.5)
    verdict = play(operated(*faults), keep_story=True)
    assert verdict.held, verdict.violations
    assert [line for line in verdict.lines if "prefill-0" in line and "is a decode worker" in line]


def test_a_router_that_stands_still_as_it_looks_who_has_which_role_leaves_no_role_to_nobody() -> None:
    """Plays a router that counts on the other prefill worker, which another router has made a decode worker."""
    stands = Fault("stands", 0.9, "router-0", seconds=8.0, aim="counting")
    asks = (Fault("role", 1.0 + i, f"prefill-{i}", seconds=0.5, asks=i) for i in range(2))
    verdict = play(operated(stands, *asks, prefill=2), keep_story=True)
    assert verdict.held, verdict.violations
    assert [line for line in verdict.lines if "prefill-0" in line and "doesn't become decode" in line]


def test_a_role_that_was_asked_for_long_ago_is_not_begun_in_another_routers_turn() -> None:
    """A partition keeps the call, which its router gives up, and its end delivers it."""
    cut = Fault("cut", 1.0, "router-0", "prefill-0", seconds=8.0)
    asks = (Fault("role", 1.01 + 0.5 * i, f"prefill-{i}", seconds=0.5, asks=i) for i in range(2))
    verdict = play(operated(cut, *asks, prefill=2), keep_story=True)
    assert verdict.held, verdict.violations
    assert [line for line in verdict.lines if "prefill-1" in line and "is a decode worker" in line], verdict.lines


def test_a_ratio_that_operators_ask_for_by_rest_is_pinned_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_for_ratios(1, 2, monkeypatch=monkeypatch)
    held = Fault("hold", 0.5, "prefill-0", seconds=4.0, over_rest=True)
    by_rest = (msgspec.structs.replace(fault, over_rest=True) for fault in asked.faults)
    faults = tuple(sorted((held, *by_rest), key=lambda fault: fault.at))
    verdict = play(msgspec.structs.replace(asked, faults=faults, controller=True), keep_story=True)
    assert verdict.held, verdict.violations
    assert [line for line in verdict.lines if "has the ratio 2:2" in line], verdict.lines
    assert [line for line in verdict.lines if "is held" in line], verdict.lines


@pytest.mark.parametrize("first", first_now(["drain", "role"]))
def test_a_worker_that_is_drained_as_it_changes_its_role_stays_drained_until_it_leaves(first: str) -> None:
    at = {"drain": 1.0, "role": 1.0} | {first: 0.95}
    faults = Fault("drain", at["drain"], "prefill-0", seconds=1.0), Fault("role", at["role"], "prefill-0")
    asks = tuple(Request(i, 0.1 * i, tuple(range(40)), LONG, router=i % 2) for i in range(30))
    verdict = play(operated(*sorted(faults, key=lambda fault: fault.at), requests=asks), keep_story=True)
    assert verdict.held, verdict.violations
    assert [line for line in verdict.lines if "is drained" in line], verdict.lines
    assert [line for line in verdict.lines if "ended: drained" in line]


def test_answers_go_on_elsewhere_however_often_their_workers_are_drained_without_grace() -> None:
    faults = tuple(Fault("drain", 1.0 + 3.0 * i, f"decode-{i % 2}", factor=TWICE) for i in range(4))
    answer = msgspec.structs.replace(LONG, max_tokens=400)
    asks = tuple(Request(i, 0.0, tuple(range(i, 40 + i)), answer, router=i % 2) for i in range(6))
    slow = msgspec.structs.replace(operated(*faults, prefill=1, decode=2, requests=asks), step_s=0.05)
    verdict = play(slow, keep_story=True)
    assert verdict.held, verdict.violations
    assert verdict.answered == len(asks)
    assert sum("is drained" in line for line in verdict.lines) == 8
