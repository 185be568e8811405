"""Makes a drawn scenario one in which somebody keeps prefixes.

Knows nothing of what is usual. Each draws from randomness of its own, so that the rest of a scenario stays.
"""

from __future__ import annotations

import random

import msgspec

from baton.drill.scenario import PrefixPin, Scenario
from baton.drill.specials import tokens_of

MOST_PINNED = 300  # tokens of a prefix


def with_pins(scenario: Scenario, span: float, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with clients who pin beginnings of prompts, and let them go."""
    rng = random.Random(f"pins {scenario.seed}")
    if rng.random() >= share:
        return scenario
    pins = [_pin(rng, scenario, span) for _ in range(rng.randint(1, 6))]
    return msgspec.structs.replace(scenario, pins=tuple(sorted(pins, key=lambda pin: pin.at)))


def _pin(rng: random.Random, scenario: Scenario, span: float) -> PrefixPin:
    like = rng.choice(scenario.requests)
    prompt = like.prompt if rng.random() < 0.7 else tokens_of(rng, rng.randint(16, 200))
    return PrefixPin(
        at=rng.uniform(0.0, span),
        prompt=prompt[: rng.randint(32, MOST_PINNED)],
        ttl_s=rng.choice((2.0, 15.0, 90.0)),
        workers=rng.choice((1, 1, 1, 2)),
        tenant=like.tenant,
        router=rng.randrange(scenario.routers),
        leaves_after=rng.uniform(0.0, rng.choice((0.05, 1.0))) if rng.random() < 0.3 else None,
        leaves_as_pinned=rng.random() < 0.7,
        unpin_after=rng.uniform(0.0, 5.0) if rng.random() < 0.3 else None,
        unpin_router=rng.randrange(scenario.routers),
    )
