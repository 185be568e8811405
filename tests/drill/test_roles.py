"""Simulated workers that can't begin another role say so, and go on in their own."""

from __future__ import annotations

import msgspec

from baton.drill.draw import draw
from baton.drill.run import play
from baton.drill.scenario import Fault, Scenario, Size

QUIET = Size(
    kinds=(), http=0.0, flooded=0.0, overloaded=0.0, pressed=0.0, scaled=0.0, pinned=0.0, adapted=0.0, requests=6
)


def asked_for_a_role(keeps: bool) -> Scenario:
    """Two workers of each role, of which an operator asks one prefill worker to decode."""
    drawn = draw(1, QUIET)
    return msgspec.structs.replace(
        drawn,
        requests=tuple(msgspec.structs.replace(request, router=0) for request in drawn.requests),
        prefill=2,
        decode=2,
        routers=1,
        batches=(),
        controller=False,
        faults=(Fault("role", 1.0, "prefill-0", seconds=1.0),),
        keep_roles=("prefill-0",) if keeps else (),
    )


def test_an_operator_hears_at_once_that_a_worker_keeps_its_role_which_plays_on() -> None:
    verdict = play(asked_for_a_role(keeps=True), keep_story=True)
    assert verdict.held, verdict.violations
    assert [line for line in verdict.lines if "prefill-0" in line and "doesn't become decode" in line]
    assert not [line for line in verdict.lines if "decode worker" in line]


def test_one_that_can_begin_it_changes() -> None:
    verdict = play(asked_for_a_role(keeps=False), keep_story=True)
    assert verdict.held, verdict.violations
    assert [line for line in verdict.lines if "prefill-0" in line and "is a decode worker" in line]


def test_workers_of_a_share_of_the_seeds_whose_roles_change_keep_theirs() -> None:
    drawn = [draw(seed) for seed in range(200)]
    keep = [scenario for scenario in drawn if scenario.keep_roles]
    assert 10 <= len(keep) <= 80
    assert all(s.controller or {f.kind for f in s.faults} & {"role", "ratio"} for s in keep)
    assert any(scenario.tells_roles for scenario in map(_alone, keep))


def _alone(scenario: Scenario) -> Scenario:
    return msgspec.structs.replace(scenario, faults=(), controller=False)
