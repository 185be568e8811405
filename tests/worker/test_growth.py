"""A pair of workers that has served much holds no more than one that has served a little."""

from __future__ import annotations

import asyncio

import pytest

from baton.kv.pages.worth import REMEMBERED
from tests.growth import grown
from tests.worker.house import Chaos, House, house

PAGES = 60  # so few that cached blocks fill them after the first round
BOUNDS = {
    "supply.cached._remembered": REMEMBERED,
    **dict.fromkeys(("supply.free", "supply.cached._runs", "supply.cached._plan"), PAGES),
    "supply.cached._runs[].pages": 2 * PAGES,
    "supply.cached._run[].pages": 2 * PAGES,
    **dict.fromkeys(("pool.blocks.page_of", "pool.blocks._added"), PAGES),  # on a busy machine they fill slowly
}


def parts(h: House) -> dict[str, object]:
    """Everything of ours in both processes of both workers."""
    return {
        "decode loop": h.d.loop,
        "decode service": h.decode,
        "decode source": h.d.source,
        "decode filler": h.d.filler,
        "intake": h.intake,
        "prefill loop": h.p.loop,
        "prefill service": h.prefill,
        "prefill source": h.p.source,
        "prefill filler": h.p.filler,
        "transport": h.transport,
    }


async def soaked(requests: int, rounds: int) -> dict[str, list[int]]:
    async with house(pages=PAGES) as h:

        async def serve(number: int) -> None:
            chaos = Chaos(h, seed=number)
            await asyncio.gather(*(chaos.client(number * requests + n) for n in range(requests)))
            other = h.decode.open_session(f"router {number}")
            h.decode.close_session(other)
            assert await h.settles()

        return await grown(lambda: parts(h), serve, BOUNDS, rounds)


async def test_nothing_in_the_workers_grows_with_the_requests_served() -> None:
    assert await soaked(requests=60, rounds=4) == {}


@pytest.mark.soak
async def test_nothing_in_the_workers_grows_in_a_long_run() -> None:
    assert await soaked(requests=1500, rounds=6) == {}
