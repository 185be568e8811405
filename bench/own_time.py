"""Measures what processes and messages of an idle running cluster take beside its engines' steps.

Knows nothing of what a step costs: that is given. Requests go one after another, so none waits for another; the
handoff's share is told by the workers' own clocks, and of what a client sees the rest is the request's.
"""

from __future__ import annotations

import asyncio

from baton.bench.live_handoffs import PromptTimes, handoff, overhead, undisturbed, until_up
from baton.cluster.config import BatonConfig
from baton.console.planning.liveprofile import MeasuringClient, connected, decode_link
from baton.cost.profiles import Overhead
from baton.launch.fleet import Fleet
from baton.planner.costs.worker import WorkerCosts
from baton.protos.errors import NoWorker
from bench.paced_load import Answered, Arrival, drive

TIMES = 9
PROMPT, ANSWER = 200, 24


def own_time(fleet: Fleet, costs: WorkerCosts, chunk_tokens: int) -> Overhead:
    """Returns the overhead of requests on ``fleet``, whose workers cost ``costs``.

    Raises NoWorker if no prefill worker is ready.
    """
    handed = asyncio.run(_handed(fleet.config, chunk_tokens))
    asked = [asyncio.run(drive(fleet, [Arrival(0.0, 0, PROMPT, ANSWER)], f"own {i}"))[0] for i in range(TIMES)]
    return split(overhead(handed, costs.transfer, chunk_tokens).handoff, asked, costs)


def split(handoff_s: float, asked: list[Answered], costs: WorkerCosts) -> Overhead:
    """Returns the overhead by part: what is left of the first token's time is the request's, of the other tokens'
    the step's.
    """
    size = PROMPT * costs.kv_bytes_per_token
    alone = costs.step_seconds(PROMPT, PROMPT * PROMPT / 2, 0, 0.0)
    alone += costs.transfer.fixed + costs.transfer.per_byte * size + handoff_s
    step = costs.step_seconds(0, 0.0, 1, PROMPT + ANSWER / 2)
    first = undisturbed([a.ttft_s for a in asked if a.ttft_s is not None])
    between = undisturbed([a.tpot_s for a in asked if a.tpot_s is not None])
    return Overhead(max(0.0, first - alone), handoff_s, max(0.0, between - step))


async def _handed(config: BatonConfig, chunk_tokens: int) -> list[PromptTimes]:
    async with connected(config) as (links, roster):
        link = await decode_link(links, roster, "")
        reader = next((k for k in links if k.info.role == "prefill" and k.info.state == "ready"), None)
        if reader is None:
            raise NoWorker("no ready prefill worker: there is no handoff to measure")
        await until_up(reader)
        asker = MeasuringClient(link, chunk_tokens)
        return [await handoff(links, reader.info.worker_id, link, asker, PROMPT) for _ in range(TIMES)]
