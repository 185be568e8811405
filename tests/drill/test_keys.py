"""Simulated clients with API keys, some of which are revoked or for another model, are let in or refused."""

from __future__ import annotations

from collections import Counter

import msgspec

from baton.drill.draw import draw
from baton.drill.run import play
from baton.drill.scenario import Size

KEYED = Size(requests=40, faults=0, http=1.0, keyed=1.0, pinned=0.0, flooded=0.0, scaled=0.0, adapted=0.0)
WORDS = ("unauthenticated", "forbidden", "complete", "revokes key")  # of stories
SURFACES = {"gRPC", "Messages", "Responses", "text"}


def test_calls_over_every_surface_are_let_in_or_refused_as_their_keys_say() -> None:
    ends: Counter[str] = Counter()
    surfaces: set[str] = set()
    for seed in range(4):
        scenario = draw(seed, KEYED)
        verdict = play(scenario, keep_story=True)
        assert verdict.held, verdict.violations
        keyed = [request for request in scenario.requests if request.over_http]
        surfaces |= {
            "gRPC" if r.over_grpc else "Messages" if r.anthropic else "Responses" if r.responses else "text"
            for r in keyed
        }
        told = [line for line in verdict.lines if " client " in line or " operator " in line]
        for word in WORDS:
            ends[word] += sum(word in line for line in told)
        if surfaces == SURFACES and all(ends[word] for word in WORDS):
            return
    raise AssertionError((surfaces, ends))


def test_a_scenario_without_keys_is_the_same_as_ever() -> None:
    with_keys, without = draw(3, KEYED), draw(3, msgspec.structs.replace(KEYED, keyed=0.0))
    assert with_keys.keys
    assert not without.keys
    plain = [msgspec.structs.replace(r, key=None, tenant="") for r in with_keys.requests]
    assert plain == [msgspec.structs.replace(r, tenant="") for r in without.requests]
