"""``baton profile measure``: what a live worker costs, measured through its own gRPC as a router would use it.

Prompts of several lengths, alone and together; batches of answers over short and long contexts; handoffs of several
sizes. Times are the workers' own (stations) or those at which tokens come, over many steps. A salt of its own keeps
its blocks apart from every tenant's. Knows nothing of how a curve is fitted.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import median

import msgspec

from baton.cluster.config import BatonConfig
from baton.cluster.membership import Roster, connect
from baton.deploy.security import router_dialer
from baton.planner.costs import WorkerCosts
from baton.planner.measured import Point, fit
from baton.protos.convert import sampling_to_pb
from baton.protos.errors import NoWorker
from baton.protos.nouns import BLOCK_TOKENS, Sampling, TransferCurve, WorkerInfo
from baton.protos.v1 import worker_pb2 as w
from baton.router.link import DecodeLink, Link
from baton.router.links import Links
from baton.router.session import Lease

LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192)
TOGETHER = ((64, 4), (64, 8), (256, 4))
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (64, 1024, 4096)
STEPS = 40
REPEATS = 3
CONNECT_S = 10.0
BEATS = 4
Told = Callable[[str], None]


class Measured(msgspec.Struct, frozen=True):
    """What was found: the points, what they make, and the worker's own limits."""

    points: tuple[Point, ...]
    costs: WorkerCosts
    info: WorkerInfo
    chunk_tokens: int
    transfers: int


async def measure(config: BatonConfig, slot: str, repeats: int, told: Told) -> Measured:
    """Of decode worker ``slot`` ("" takes the least busy). Raises NoWorker and what the worker raises."""
    async with _connected(config) as (links, roster):
        link = await _decode_link(links, roster, slot)
        chunk = config.worker.prefill_chunk_tokens
        bench = _Bench(link, chunk, told)
        points = [*await bench.prompts(repeats), *await bench.answers()]
        transfers = await _handoffs(links, roster, link, bench, told)
        curve, transfer = fit(points), _transfer_curve(roster)
    info = link.info
    costs = WorkerCosts(
        about=f"{info.model_id} on {info.device}, measured through worker {info.worker_id}",
        fixed=curve.fixed,
        weights=0.0,
        token=curve.prefill_token,
        pair=curve.prefill_pair,
        sequence=curve.decode_sequence,
        context=curve.decode_context_token,
        kv_tokens=info.pages * BLOCK_TOKENS,
        kv_bytes_per_token=max(1, info.layout.page_bytes // BLOCK_TOKENS),
        transfer=transfer,
        written=0.0,
    )
    return Measured(tuple(points), costs, info, chunk, transfers)


class _Bench:
    """Requests to one decode worker, on its local way."""

    def __init__(self, link: DecodeLink, chunk_tokens: int, told: Told) -> None:
        self.salt = os.urandom(16)
        self._link, self._chunk, self._told = link, chunk_tokens, told
        self._rng, self._serial = random.Random(0), itertools.count()
        self.longest = min(link.info.max_model_len, link.info.pages * BLOCK_TOKENS // 2) - STEPS - 1

    def tokens(self, count: int) -> list[int]:
        """Any ids."""
        return [self._rng.randrange(self._link.info.vocab_size) for _ in range(count)]

    async def prompts(self, repeats: int) -> list[Point]:
        """Prefill over length, alone, and over batch."""
        points = []
        for length, count in (*((n, 1) for n in LENGTHS), *TOGETHER):
            if length * count > self.longest:
                continue
            seconds = median([await self._read(length, count) for _ in range(repeats)])
            total = length * count
            pairs = count * length * length / 2
            point = Point(
                f"{count} x {length} prompt tokens", -(-total // self._chunk), total, pairs, 0, 0, seconds
            )
            self._told(f"{point.what}: {seconds * 1e3:.1f} ms")
            points.append(point)
        return points

    async def answers(self) -> list[Point]:
        """Decode over batch and context."""
        points = []
        for context, batch in itertools.product(CONTEXTS, BATCHES):
            private = batch * (STEPS + 2 * BLOCK_TOKENS)
            if context > self.longest or batch > self._link.info.max_batch or private > self.longest:
                continue
            seconds = await self._step(context, batch)
            if seconds is None:
                continue
            read = batch * (context + STEPS / 2)
            point = Point(f"{batch} answers over {context} tokens", 1, 0, 0, batch, read, seconds)
            self._told(f"{point.what}: {seconds * 1e3:.2f} ms a step")
            points.append(point)
        return points

    async def _read(self, length: int, count: int) -> float:
        """Seconds from the first prompt's admission to the last one's first token, by the worker's clock."""
        prompts = [self.tokens(length) for _ in range(count)]
        heard = await asyncio.gather(*(self.ask(prompt, 1) for prompt in prompts))
        return max(h.prefill_s for h in heard)

    async def _step(self, context: int, batch: int) -> float | None:
        """Seconds of one step while all of the batch write; None where they never did."""
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

    async def ask(self, prompt: list[int], outputs: int) -> _Heard:
        """One request, to its end."""
        heard = _Heard()
        async with self._link.admit(self.admit(prompt, outputs, local=True), heard.take, lambda: "retry") as lease:
            await lease.ended
        return heard

    def admit(self, prompt: list[int], outputs: int, local: bool) -> w.Admit:
        """Greedy, to its full length."""
        return w.Admit(
            request_id=f"profile-{self.salt.hex()[:8]}-{next(self._serial)}",
            model_id=self._link.info.model_id,
            token_ids=prompt,
            prompt_tokens=len(prompt),
            sampling=sampling_to_pb(Sampling(temperature=0.0, max_tokens=outputs, ignore_eos=True)),
            tenant_salt=self.salt,
            local=local,
        )


class _Heard:
    """One answer: when each token came (tokens of one frame share their time out), and how long the prompt took."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.prefill_s = 0.0

    def take(self, output: w.RequestTokens) -> None:
        """Some more of it."""
        now, count = time.monotonic(), len(output.run.token_ids)
        last = self.times[-1] if self.times else now
        self.times += [last + (now - last) * (i + 1) / count for i in range(count)]
        self.prefill_s += sum(s.seconds for s in output.stations if s.name == "prefill")


@asynccontextmanager
async def _connected(config: BatonConfig) -> AsyncIterator[tuple[Links, Roster]]:
    """Links to every worker of the cluster, as a router has them."""
    redis = connect(config.redis.url)
    links = Links(f"profile-{os.getpid()}", lambda: None, random.Random(), dialer=router_dialer(config))
    try:
        async with Roster(redis, config.cluster.namespace) as roster:
            links.sync({name: entry.info for name, entry in roster.snapshot().items()})
            yield links, roster
    finally:
        await links.close()
        await redis.aclose()


async def _decode_link(links: Links, roster: Roster, slot: str) -> DecodeLink:
    busy = {name: entry.load.running + entry.load.waiting for name, entry in roster.snapshot().items()}
    wanted = [
        k for k in links if isinstance(k, DecodeLink) and k.info.state == "ready" and slot in ("", k.info.worker_id)
    ]
    if not wanted:
        raise NoWorker(f"no ready decode worker {slot or 'at all'}; `baton workers` shows them")
    chosen = min(wanted, key=lambda k: busy.get(k.info.worker_id, 0))
    await _until_up(chosen)
    return chosen


async def _until_up(link: Link) -> None:
    deadline = time.monotonic() + CONNECT_S
    while not link.up:
        if time.monotonic() > deadline:
            raise NoWorker(f"{link.info.worker_id} can't be reached at {link.info.address}")
        await asyncio.sleep(0.02)


async def _handoffs(links: Links, roster: Roster, decode: DecodeLink, bench: _Bench, told: Told) -> int:
    """Prompts of several sizes from a prefill worker to the decode worker; how many. The worker fits the curve."""
    reader = next((k for k in links if k.info.role == "prefill" and k.info.state == "ready"), None)
    if reader is None:
        told("no prefill worker: transfers are not measured")
        return 0
    await _until_up(reader)
    link, done = links.prefill(reader.info.worker_id), 0
    for length in (n for n in LENGTHS if n <= bench.longest):
        for _ in range(2):
            prompt = bench.tokens(length)
            sink: Callable[[w.RequestTokens], None] = _Heard().take
            async with decode.admit(bench.admit(prompt, 1, local=False), sink, lambda: "retry") as lease:
                reply = await link.prefill(_prefill(bench, prompt, lease, decode.info), None)
                await lease.ended
            done += 1
        told(f"{length} prompt tokens handed over: {reply.shipped_bytes} bytes")
    await asyncio.sleep(0.5 * BEATS)
    await roster.refresh()
    return done


def _prefill(bench: _Bench, prompt: list[int], lease: Lease, to: WorkerInfo) -> w.PrefillRequest:
    admit = bench.admit(prompt, 1, local=False)
    return w.PrefillRequest(
        request_id=lease.request_id,
        model_id=to.model_id,
        lease=lease.lease,
        epoch=lease.epoch,
        decode_address=to.address,
        decode_incarnation=to.incarnation,
        token_ids=prompt,
        prompt_tokens=len(prompt),
        held_blocks=lease.held_blocks,
        sampling=admit.sampling,
        tenant_salt=bench.salt,
    )


def _transfer_curve(roster: Roster) -> TransferCurve:
    """The mean of what prefill workers fitted to their own handoffs."""
    found = [e.load.transfer_curve for e in roster.snapshot().values() if e.load.transfer_curve is not None]
    if not found:
        return TransferCurve(0.0, 0.0)
    count = len(found)
    return TransferCurve(sum(c.fixed for c in found) / count, sum(c.per_byte for c in found) / count)
