"""``baton profile measure``: measures a live worker's costs through its own gRPC, as a router would use it.

It sends prompts of several lengths, alone and together; batches of answers over short and long contexts; handoffs
of several sizes. Times are the workers' own (stations) or those at which tokens come, over many steps. A salt of
its own keeps its blocks apart from every tenant's. Knows nothing of how a curve is fitted.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from statistics import median

import msgspec

from baton.bench.live_handoffs import handoffs, overhead, transfer_curve, until_up
from baton.cluster.config import BatonConfig
from baton.cluster.membership import PolledRoster, connect
from baton.console.planning.rank_costs import rank_costs_of
from baton.kv.layout.room import WORKING_STATES, handoff_bytes, pool_tokens, prompt_room
from baton.kv.layout.state import state_pages
from baton.kv.layout.tables import table_count
from baton.planner.costs.adapters import NONE_SEEN, added
from baton.planner.costs.measured import StepTiming, fit
from baton.planner.costs.worker import WorkerCosts, from_curve
from baton.process.security import router_dialer
from baton.protos.convert import sampling_to_pb
from baton.protos.errors import NoWorker
from baton.protos.measurements import StepCurve
from baton.protos.nouns import BLOCK_TOKENS, Sampling, WorkerInfo
from baton.protos.v1 import worker_pb2 as w
from baton.router.workers.link import DecodeLink
from baton.router.workers.link_table import LinkTable

# Tokens of prompts that are read alone, doubling so that a curve is fitted well.
LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192)
# Tokens and number of prompts that are read in one step, which shows what a sequence costs.
TOGETHER = ((64, 4), (64, 8), (256, 4))
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # sequences of a decode step, up to the default of worker.max_batch
CONTEXTS = (64, 1024, 4096)  # tokens before the decoded ones, because attention's cost rises with them
ADAPTERS = (1, 2, 4, 8)  # in use at once, as far as the worker holds so many
ADAPTED_BATCHES, ADAPTED_PROMPT = (1, 8, 16), 16  # sequences on an adapter, and tokens of their prompts
STEPS = 40  # decode steps that a figure is measured over
REPEATS = 3  # measurements of each point, of which the median counts
TRIES = 5  # at having all answers of a batch write at once, which a busy machine may prevent
BEATS, BEAT_S = 4, 0.5  # of the workers' memberships: then Redis has what they learned
Told = Callable[[str], None]


class LiveMeasurement(msgspec.Struct, frozen=True):
    """Holds the measured points, the costs fitted to them, and the worker's description.

    ``chunk_tokens`` is its prefill chunk; ``transfers`` counts measured handoffs.
    """

    points: tuple[StepTiming, ...]
    costs: WorkerCosts
    info: WorkerInfo
    chunk_tokens: int
    transfers: int


async def measure(config: BatonConfig, slot: str, repeats: int, told: Told) -> LiveMeasurement:
    """Measures decode worker ``slot`` ("": the least busy); ``told`` is called with lines of progress.

    Raises NoWorker and what the worker raises.
    """
    async with connected(config) as (links, roster):
        link = await decode_link(links, roster, slot)
        chunk = config.worker.prefill_chunk_tokens
        bench = MeasuringClient(link, chunk, told)
        points = [*await bench.prompts(repeats), *await bench.answers()]
        await bench.adapted(link.info.adapters)
        handed = await handoffs(links, link, bench, told)
        await asyncio.sleep(BEAT_S * BEATS)
        await roster.refresh()
        curve, transfer = fit(points), transfer_curve(roster)
        entry = roster.snapshot().get(link.info.worker_id)
        adapters = None if entry is None else entry.load.adapter_curve
    told(NONE_SEEN if adapters is None else f"adapters: {added(adapters)}")
    info, ranks = link.info, await asyncio.to_thread(rank_costs_of, config)
    handoff = overhead(handed, transfer, chunk)
    costs = from_curve(*described(info, bench.longest, curve), transfer, handoff, adapters)
    costs = msgspec.structs.replace(costs, ranks=ranks)
    return LiveMeasurement(tuple(points), costs, info, chunk, len(handed))


def described(info: WorkerInfo, longest: int, curve: StepCurve) -> tuple[str, StepCurve, int, int]:
    """Returns what ``from_curve`` takes of a worker: a text, ``curve``, its pool's tokens and a token's bytes.

    A profile has one number of each. Where they depend on a sequence's length, as with windows or recurrent states,
    it is that of the longest context that was measured, and the text says so.
    """
    layout, context = info.layout, max(BLOCK_TOKENS, min(CONTEXTS[-1], longest))
    about = f"{info.model_id} on {info.device}, measured through worker {info.worker_id}"
    kv_tokens, size = pool_tokens(layout, info.pages, context), handoff_bytes(layout, context) // context
    if kv_tokens != pool_tokens(layout, info.pages, 2 * context):
        about = f"{about}, KV of contexts of {context} tokens"
    return about, curve, kv_tokens, max(1, size)


class MeasuringClient:
    """Sends measuring requests to one decode worker, which prefills them itself."""

    def __init__(self, link: DecodeLink, chunk_tokens: int, told: Told = lambda line: None) -> None:
        self.salt = os.urandom(16)
        self._link, self._chunk, self._told = link, chunk_tokens, told
        self._rng, self._serial = random.Random(0), itertools.count()
        self._room = link.info.pages // 2  # in pages: the other half is for what is cached from before
        self.longest = min(link.info.max_model_len, prompt_room(link.info.layout, self._room)) - STEPS - 1

    def tokens(self, count: int) -> list[int]:
        """Returns ``count`` random token ids."""
        return [self._rng.randrange(self._link.info.vocab_size) for _ in range(count)]

    async def prompts(self, repeats: int) -> list[StepTiming]:
        """Returns prefill timings over prompt lengths and numbers of prompts, each the median of ``repeats``."""
        points = []
        for length, count in (*((n, 1) for n in LENGTHS), *TOGETHER):
            if length * count > self.longest:
                continue
            seconds = median([await self._read(length, count) for _ in range(repeats)])
            total = length * count
            pairs = count * length * length / 2
            point = StepTiming(
                f"{count} x {length} prompt tokens", -(-total // self._chunk), total, pairs, 0, 0, seconds
            )
            self._told(f"{point.what}: {seconds * 1e3:.1f} ms")
            points.append(point)
        return points

    async def answers(self) -> list[StepTiming]:
        """Returns decode step timings over batch sizes and context lengths."""
        points = []
        for context, batch in itertools.product(CONTEXTS, BATCHES):
            private = batch * _private_pages(self._link.info)
            if context > self.longest or batch > self._link.info.max_batch or private > self._room:
                continue
            seconds = None
            for _ in range(TRIES):
                seconds = seconds or await self._step(context, batch)
            if not seconds:
                continue
            read = batch * (context + STEPS / 2)
            point = StepTiming(f"{batch} answers over {context} tokens", 1, 0, 0, batch, read, seconds)
            self._told(f"{point.what}: {seconds * 1e3:.2f} ms a step")
            points.append(point)
        return points

    async def adapted(self, adapters: Sequence[str]) -> None:
        """Writes answers on the worker's adapters, on one of them and on several, so that the worker can fit what
        they add to its steps; does nothing without adapters.

        Each round is beside one of the model alone, so that a machine whose speed drifts slows both.
        """
        rounds = dict.fromkeys(min(count, len(adapters)) for count in ADAPTERS) if adapters else ()
        batches = dict.fromkeys(min(batch, self._link.info.max_batch) for batch in ADAPTED_BATCHES)
        for count, batch in itertools.product(rounds, batches):
            bare = await self._written_s(batch, ("",))
            seconds = await self._written_s(batch, adapters[:count])
            self._told(f"{batch} answers on {count} adapters: {seconds:.2f} s, on none: {bare:.2f} s")

    async def _written_s(self, batch: int, adapters: Sequence[str]) -> float:
        """Seconds until ``batch`` short prompts on ``adapters`` in turn have their answers."""
        prompts = [self.tokens(ADAPTED_PROMPT) for _ in range(batch)]
        began = time.monotonic()
        on = itertools.cycle(adapters)
        await asyncio.gather(*(self.ask(prompt, STEPS, next(on)) for prompt in prompts))
        return time.monotonic() - began

    async def _read(self, length: int, count: int) -> float:
        """Seconds from the first prompt's admission to the last one's first token, by the worker's clock."""
        prompts = [self.tokens(length) for _ in range(count)]
        heard = await asyncio.gather(*(self.ask(prompt, 1) for prompt in prompts))
        return max(h.prefill_s for h in heard)

    async def _step(self, context: int, batch: int) -> float | None:
        """Seconds of one step while all of the batch write; None where they never did, 0 where all that they wrote
        came at once.
        """
        stem = self.tokens(context - BLOCK_TOKENS)
        await self.ask([*stem, *self.tokens(1)], 1)  # from now on the stem is cached
        prompts = [[*stem, *self.tokens(BLOCK_TOKENS)] for _ in range(batch)]
        heard = await asyncio.gather(*(self.ask(prompt, STEPS * 2) for prompt in prompts))
        since, until = max(h.times[0] for h in heard), min(h.times[-1] for h in heard)
        steps = [[t for t in h.times if since <= t <= until] for h in heard]
        shortest = min(steps, key=len)
        if len(shortest) < STEPS // 2:
            return None
        return (shortest[-1] - shortest[0]) / (len(shortest) - 1)

    async def ask(self, prompt: list[int], outputs: int, adapter: str = "") -> _AnswerTimes:
        """Sends one request with ``prompt`` token ids for ``outputs`` tokens; returns when each token came, once it
        has ended.
        """
        heard, admit = _AnswerTimes(), self.admit(prompt, outputs, local=True, adapter=adapter)
        async with self._link.admit(admit, heard.take, lambda: "retry") as lease:
            await lease.ended
        return heard

    def admit(self, prompt: list[int], outputs: int, local: bool, adapter: str = "") -> w.Admit:
        """Returns the message that admits a greedy request of exactly ``outputs`` tokens; ``local``: prefilled by
        the decode worker.
        """
        return w.Admit(
            request_id=f"profile-{self.salt.hex()[:8]}-{next(self._serial)}",
            model_id=self._link.info.model_id,
            token_ids=prompt,
            prompt_tokens=len(prompt),
            sampling=sampling_to_pb(Sampling(temperature=0.0, max_tokens=outputs, ignore_eos=True)),
            tenant_salt=self.salt,
            adapter_id=adapter,
            local=local,
        )


def _private_pages(info: WorkerInfo) -> int:
    """Returns how many pages an answer over a cached context has that no other one shares."""
    blocks = -(-(STEPS + 2 * BLOCK_TOKENS) // info.layout.block_tokens)
    return blocks * table_count(info.layout) + WORKING_STATES * state_pages(info.layout)


class _AnswerTimes:
    """One answer: when each token came (tokens of one frame share their time out), and how long the prompt took."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.prefill_s = 0.0

    def take(self, output: w.RequestTokens) -> None:
        """Records the times of the tokens that ``output`` brings."""
        now, count = time.monotonic(), len(output.run.token_ids)
        last = self.times[-1] if self.times else now
        self.times += [last + (now - last) * (i + 1) / count for i in range(count)]
        self.prefill_s += sum(s.seconds for s in output.stations if s.name == "prefill")


@asynccontextmanager
async def connected(config: BatonConfig) -> AsyncIterator[tuple[LinkTable, PolledRoster]]:
    """Connects to every worker of the cluster, as a router does, while the block runs; gives (links, roster)."""
    redis = connect(config.redis.url)
    links = LinkTable(f"profile-{os.getpid()}", lambda: None, random.Random(), dialer=router_dialer(config))
    try:
        async with PolledRoster(redis, config.cluster.namespace) as roster:
            links.sync({name: entry.info for name, entry in roster.snapshot().items()})
            yield links, roster
    finally:
        await links.close()
        await redis.aclose()


async def decode_link(links: LinkTable, roster: PolledRoster, slot: str) -> DecodeLink:
    """Returns the link to ready decode worker ``slot`` ("": the least busy) once it is up.

    Raises NoWorker if there is none.
    """
    busy = {name: entry.load.running + entry.load.waiting for name, entry in roster.snapshot().items()}
    wanted = [
        k for k in links if isinstance(k, DecodeLink) and k.info.state == "ready" and slot in ("", k.info.worker_id)
    ]
    if not wanted:
        raise NoWorker(f"no ready decode worker {slot or 'at all'}; `baton workers` shows them")
    chosen = min(wanted, key=lambda k: busy.get(k.info.worker_id, 0))
    await until_up(chosen)
    return chosen
