"""Compares routing policies by the requests that they answer in time.

A real trace, the real policies, workers on a virtual clock.

    .venv/bin/python -m bench.policies [--trace FILE] [--rates 8 12] [--prefill 3] [--decode 2] [--profile NAME]

The policies are router/policies' own files, asked with the snapshots that the router would make: its exact counts
of what it placed, and workers' loads that are up to a beat old. The trace is a sample of whole conversations of an
hour (so that their reuse of prefixes is whole too), replayed faster. Workers step by a profile's cost curve
(continuous batching, chunks, shortest rest first, an LRU prefix cache in 512-token blocks, pages); a decode worker
without pages refuses, and is asked again after 0.25 s. Knows nothing of processes, sockets or tokens.

A request is good when its first token comes within 1 s + 2 x the time of reading it alone, and its time per output
token is 30 ms or less.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from baton.cost.curves import exposed_seconds, prefill_seconds, transfer_seconds
from baton.cost.profiles import PacedProfile, load_profile
from baton.protos.measurements import StepCurve
from baton.protos.nouns import BLOCK_TOKENS
from baton.router.policies import ClusterSnapshot, Policy, RoutingRequest, load_policy, names
from baton.router.policies.adjustments.prefix_fetch import uncached, with_fetch
from bench.replayed_worker import SLO_TPOT_S, Call, Worker

TRACE = Path(__file__).resolve().parent.parent / "tests/data/mooncake_conversation_sessions.jsonl"
BEAT_S, FULL_S, LOOK_AHEAD = 0.5, 0.25, 8
SLO_FLOOR_S, SLO_READS = 1.0, 2.0


class Replay:
    """One policy before one cluster."""

    def __init__(self, policy: Policy, profile: PacedProfile, prefill: int, decode: int, slow: float = 1.0) -> None:
        self._policy, self._now, self._turn = policy, 0.0, 0
        self._prefill = {f"p{i}": Worker(f"p{i}", "prefill", profile) for i in range(prefill)}
        self._prefill["p0"].profile = _slower(profile, slow)
        self._decode = {f"d{i}": Worker(f"d{i}", "decode", profile) for i in range(decode)}
        self._workers = self._prefill | self._decode
        self._profile = profile
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._queue: deque[Call] = deque()
        self._left = 0
        self.computed = 0

    def run(self, calls: list[Call]) -> None:
        """Plays the load to its last token."""
        self._left = len(calls)
        for call in calls:
            self._at(call.arrived, partial(self._arrive, call))
        self._beat()
        while self._left:
            self._now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), event))

    def _beat(self) -> None:
        for worker in self._workers.values():
            worker.beat()
        self._pump()
        self._at(self._now + BEAT_S, self._beat)

    def _arrive(self, call: Call) -> None:
        self._queue.append(call)
        self._pump()

    def _pump(self) -> None:
        """Places queued requests in order; a few may pass one that finds no room."""
        misses, at = 0, 0
        while at < len(self._queue) and misses < LOOK_AHEAD:
            if self._place(self._queue[at]):
                del self._queue[at]
            else:
                misses, at = misses + 1, at + 1

    def _place(self, call: Call) -> bool:
        hits = {k: w.held(call) for k, w in self._workers.items()}
        left = max(1e-3, call.slo_ttft_s - (self._now - call.arrived))
        ask = RoutingRequest(call.tokens, call.outputs, hits, slo_ttft_s=left, slo_tpot_s=SLO_TPOT_S)
        snapshot = self._snapshot()
        decision = self._policy(snapshot, ask)
        if decision is None:
            return False
        decision = with_fetch(snapshot, ask, decision)
        taken = decision.taken
        writer, reader = self._decode[taken.decode], self._workers[taken.reader]
        if writer.pages + call.pages > writer.info.pages:
            writer.full_until = self._now + FULL_S  # PoolExhausted
            return False
        self._turn += 1
        call.placed = self._now
        call.uncached = call.left = uncached(ask, taken)
        self.computed += call.uncached
        call.read_s = prefill_seconds(self._profile.step, call.uncached, call.tokens - call.uncached)
        writer.pages += call.pages
        writer.sequences += 1
        reader.pending_prompts += 1
        reader.pending_tokens += call.uncached
        reader.placed[id(call)] = decision
        fetched = taken.fetch_blocks * BLOCK_TOKENS - ask.cached(taken.reader) if taken.fetch_blocks else 0
        delay = transfer_seconds(self._profile.transfer, fetched * self._profile.kv_bytes_per_token)
        self._at(self._now + delay, lambda: self._read(reader, call))
        return True

    def _read(self, reader: Worker, call: Call) -> None:
        """Computes the rest of a prompt whose fetched part has arrived."""
        reader.reading.append(call)
        self._step(reader)

    def _snapshot(self) -> ClusterSnapshot:
        prefill = tuple(w.candidate(self._now) for w in self._prefill.values())
        return ClusterSnapshot(prefill, tuple(w.candidate(self._now) for w in self._decode.values()), self._turn)

    def _step(self, worker: Worker) -> None:
        if worker.busy or not (worker.reading or worker.writing):
            return
        worker.busy = True
        seconds, read, wrote = worker.step(self._now)
        self._at(self._now + seconds, lambda: self._stepped(worker, read, wrote))

    def _stepped(self, worker: Worker, read: list[Call], wrote: list[Call]) -> None:
        worker.busy = False
        for call in wrote:
            call.written += 1
            if call.written >= call.outputs:
                self._end(worker, call)
        for call in read:
            self._has_read(worker, call)
        self._step(worker)

    def _has_read(self, reader: Worker, call: Call) -> None:
        """The prompt is computed; from a prefill worker what is left of its blocks is shipped first."""
        writer = self._decode[reader.placed.pop(id(call)).taken.decode]
        reader.keep(call)
        delay = 0.0
        if writer is not reader:
            size = self._profile.kv_bytes_per_token * max(1, call.tokens - writer.held(call) * BLOCK_TOKENS)
            last = min(size, self._profile.kv_bytes_per_token * self._profile.prefill_chunk)
            delay = exposed_seconds(self._profile.transfer, size, last, call.read_s)
        self._at(self._now + delay, lambda: self._begin(reader, writer, call))

    def _begin(self, reader: Worker, writer: Worker, call: Call) -> None:
        reader.pending_prompts -= 1
        reader.pending_tokens -= call.uncached
        call.first, call.written = self._now, 1
        writer.keep(call)
        if call.outputs <= 1:
            self._end(writer, call, in_batch=False)
        else:
            writer.writing.append(call)
            self._step(writer)
        self._pump()

    def _end(self, worker: Worker, call: Call, in_batch: bool = True) -> None:
        if in_batch:
            worker.writing.remove(call)
        call.ended = self._now
        worker.pages -= call.pages
        worker.sequences -= 1
        self._left -= 1
        self._pump()


def _slower(profile: PacedProfile, times: float) -> PacedProfile:
    step = StepCurve(*(value * times for value in msgspec.structs.astuple(profile.step)))
    return msgspec.structs.replace(profile, step=step)


def calls_of(
    trace: Path, rate: float, profile: PacedProfile, turned: float = 0.0, count: int = 1 << 30
) -> list[Call]:
    """The trace's requests, ``rate`` times as fast, begun at ``turned`` of its length (0..1), going round."""
    rows = [json.loads(line) for line in trace.read_text().splitlines()[:count]]
    span, start = rows[-1]["timestamp"] / 1000, turned * rows[-1]["timestamp"] / 1000
    found = []
    for row in rows:
        tokens, outputs = row["input_length"], max(1, row["output_length"])
        slo = SLO_FLOOR_S + SLO_READS * prefill_seconds(profile.step, tokens)
        arrived = (row["timestamp"] / 1000 - start) % (span + 1e-9) / rate
        found.append(Call(arrived, tokens, outputs, row["hash_ids"], slo))
    return sorted(found, key=lambda c: c.arrived)


class Result(msgspec.Struct, frozen=True):
    """Holds what one policy made of one load: seconds, and ``goodput`` in requests per second of the trace's own
    time.
    """

    policy: str
    rate: float
    goodput: float
    good: float
    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    computed: float


def replay(
    policy: str, rate: float, prefill: int, decode: int, profile: PacedProfile, trace: Path = TRACE,
    count: int = 1 << 30, repeats: int = 1, slow: float = 1.0,
) -> Result:  # fmt: skip
    """Returns the deterministic result of ``policy``.

    The ``repeats`` replays begin at as many points of the trace and count as one. The first prefill worker is
    ``slow`` times as slow as the others.
    """
    calls: list[Call] = []
    span = computed = 0.0
    for repeat in range(repeats):
        some = calls_of(trace, rate, profile, repeat / repeats, count)
        run = Replay(load_policy(policy), profile, prefill, decode, slow)
        run.run(some)
        calls += some
        span += some[-1].arrived - some[0].arrived
        computed += run.computed
    good = sum(c.good for c in calls)
    ttft = sorted(c.first - c.arrived for c in calls)
    tpot = sorted((c.ended - c.first) / max(1, c.outputs - 1) for c in calls)
    p99 = int(0.99 * len(calls))
    share = computed / sum(c.tokens for c in calls)
    return Result(policy, rate, good / span, good / len(calls), ttft[len(ttft) // 2], ttft[p99], tpot[p99], share)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--rates", type=float, nargs="+", default=[9.0, 12.0, 15.0, 18.0])
    parser.add_argument("--prefill", type=int, default=3)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--profile", default="h100-llama3-8b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow", type=float, default=1.0, help="the first prefill worker is so many times slower")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    profile, results = load_profile(given.profile), []
    mixed = f", p0 {given.slow:g} x slower" if given.slow != 1 else ""
    print(f"{given.prefill}P{given.decode}D {given.profile}{mixed}, {given.trace.name}, {given.repeats} replays")
    print("rate  policy         goodput req/s   good   TTFT p50   TTFT p99   TPOT p99   computed")
    for rate in given.rates:
        for policy in names():
            r = replay(
                policy,
                rate,
                given.prefill,
                given.decode,
                profile,
                given.trace,
                repeats=given.repeats,
                slow=given.slow,
            )
            results.append(r)
            print(
                f"{rate:4.1f}  {policy:13s} {r.goodput:14.2f} {r.good:6.1%} {r.ttft_p50:9.2f}s {r.ttft_p99:9.2f}s "
                f"{r.tpot_p99 * 1000:7.1f}ms {r.computed:9.0%}"
            )
    if given.json:
        given.json.write_bytes(msgspec.json.encode(results))


if __name__ == "__main__":
    main()
