"""Pinned prefixes in the simulated cluster: kept until their time by whoever took them."""

from __future__ import annotations

import msgspec
import pytest

from baton.drill.draw import draw
from baton.drill.run import Verdict, play
from baton.drill.scenario import Fault, PrefixPin, Request, Scenario, Size
from baton.protos.nouns import Sampling
from baton.worker.cache.pins import PrefixPins

PREFIX = tuple(range(100))


def pinned(*pins: PrefixPin, faults: tuple[Fault, ...] = ()) -> Scenario:
    """Two prefill workers and a decode worker, whose prompts push one another out of few pages."""
    quiet = draw(8, Size(workers=1, requests=1, kinds=(), pressed=0.0, paged=0.0, adapted=0.0))
    asks = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
    requests = tuple(Request(i, 0.2 * i, tuple((7 * i + j) % 97 for j in range(300)), asks) for i in range(20))
    plain = {"batches": (), "pages": 40, "local_max": 0, "controller": False, "prefill": 2, "routers": 2}
    return msgspec.structs.replace(quiet, requests=requests, pins=pins, faults=faults, **plain)


def told(scenario: Scenario) -> tuple[Verdict, list[str]]:
    verdict = play(scenario, keep_story=True)
    return verdict, [line.split(maxsplit=1)[1] for line in verdict.lines if " pinner" in line]


@pytest.mark.thorough  # tests/worker/cache/test_pins.py
def test_a_pinned_prefix_stays_while_other_prompts_pass_and_goes_as_it_is_let_go() -> None:
    verdict, said = told(pinned(PrefixPin(0.1, PREFIX, 90.0, workers=2), PrefixPin(0.2, PREFIX[::-1], 1.0)))
    assert verdict.held, verdict.violations
    assert any("has {'prefill-0': 96, 'prefill-1': 96}" in line for line in said)
    assert any("status 200" in line for line in said)


def test_a_worker_that_changes_its_role_keeps_its_pins_and_lets_them_go_when_it_is_told() -> None:
    turned = Fault("role", 1.5, "prefill-0", seconds=0.5)
    verdict, said = told(pinned(PrefixPin(0.1, PREFIX, 90.0, workers=2), faults=(turned,)))
    assert verdict.held, verdict.violations
    assert any("status 200" in line for line in said)


def test_who_says_that_a_prefix_is_pinned_and_forgets_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = PrefixPins._hold

    async def forgets(self: PrefixPins, hashes: list[bytes]) -> tuple[int, int]:
        key, pages = await hold(self, hashes)
        self._source.let_go(key)
        return key, pages

    monkeypatch.setattr(PrefixPins, "_hold", forgets)
    verdict, _ = told(pinned(PrefixPin(0.1, PREFIX, 90.0)))
    assert any("blocks that it is to keep" in violation for violation in verdict.violations), verdict.violations
