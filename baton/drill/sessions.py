"""Draws conversations: sessions whose turns are asked one after another, each with the answer before it in its
prompt.

Knows nothing of where a turn is served. It draws from randomness of its own, so that the rest of a scenario stays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from baton.drill.language import oracle
from baton.drill.scenario import Request, Scenario
from baton.drill.specials import tokens_of
from baton.protos.nouns import BLOCK_TOKENS, Sampling

MOST_TOKENS = 450  # tokens of a turn's prompt
OF_PAGES = 0.6  # share of a worker's pages that a conversation may need
ELSEWHERE = 0.1  # share of the turns that are asked at any router, instead of the session's own
NAMES = ("s", "s", "t")  # of sessions; two of them have one name, and tenants of their own


def with_sessions(scenario: Scenario, span: float, share: float) -> Scenario:
    """Returns ``scenario``, in ``share`` of them with the turns of one to three conversations as well."""
    rng = random.Random(f"sessions {scenario.seed}")
    if rng.random() >= share:
        return scenario
    first = max(request.number for request in scenario.requests) + 1
    turns: list[Request] = []
    for name, tenant in zip(NAMES[: rng.choice((1, 2, 3))], ("", "a", "b"), strict=False):
        turns += _turns(rng, scenario, first + len(turns), span, name, tenant)
    requests = sorted((*scenario.requests, *turns), key=lambda request: request.at)
    return msgspec.structs.replace(scenario, requests=tuple(requests))


def _turns(
    rng: random.Random, scenario: Scenario, first: int, span: float, name: str, tenant: str
) -> Iterator[Request]:
    """Draws the turns of one conversation, of which the first has the number ``first``."""
    prompt, at, home = (
        tokens_of(rng, rng.randint(16, 150)),
        rng.uniform(0.0, span / 2),
        rng.randrange(scenario.routers),
    )
    wired = rng.random() < 0.4 and not scenario.keys
    most = min(MOST_TOKENS, int(OF_PAGES * scenario.pages * BLOCK_TOKENS))
    for number in range(first, first + rng.randint(2, 5)):
        sampled = rng.random() < 0.5
        sampling = Sampling(
            temperature=0.5 if sampled else 0.0,
            seed=rng.getrandbits(63),
            max_tokens=rng.randint(8, 60),
            ignore_eos=True,
        )
        if len(prompt) + sampling.max_tokens > most:
            return
        yield Request(
            number=number,
            at=at,
            prompt=prompt,
            sampling=sampling,
            router=rng.randrange(scenario.routers) if rng.random() < ELSEWHERE else home,
            tenant=tenant,
            cancels=(rng.uniform(0.0, 2.0),) if rng.random() < 0.1 else (),
            over_http=rng.choice(("whole", "stream")) if wired else "",
            session=name,
            follows=number - 1 if number > first else -1,
        )
        answer, _ = oracle.answer(prompt, sampling, 0, "", scenario.sight)
        prompt, at = (*prompt, *answer, *tokens_of(rng, rng.randint(1, 40))), at + rng.uniform(0.0, 2.0)
