"""The simulator against the paced engine: the same arrivals through real processes and through modelled time.

    .venv/bin/python -m bench.sim_vs_paced [--seconds 20] [--ratios 1:1 3:1 1:3 4:4 8:8] [--loads even] [--slow N]
                                           [--out FILE]

Three workloads (even, long prompts, long answers) times five ratios; a cluster is started once per ratio. The real
side is a router, paced workers and Redis, asked over HTTP by a client per request; the simulator is fed with the
profile that the workers step by, with what processes and messages take on the idle cluster (own_time.py, measured
once per ratio, before the loads), and with the times at which the requests were really sent. Rates scale with what
the ratio can carry (70% of its fuller role). Errors are of TTFT and TPOT at p50 and p99.

Processes share this machine's cores, and a worker is two of them: where the cores carry more than PER_CORE each,
everything there takes so many times as long in every step and between arrivals (``--slow`` sets it; 1: never). It
is the same load, of which the machine's own share is that much smaller; with ``--slow 1`` that share is in the
errors, as is everything else that this machine does meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from baton.cluster.config import WorkerConfig
from baton.controller.pressure import BURSTS, WorkerLimits, capacity
from baton.cost.profiles import Overhead, load_profile
from baton.launch.fleet import Fleet
from baton.planner.costs.worker import WorkerCosts, from_paced
from baton.planner.figures import percentile
from baton.planner.score import tpot, ttft
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim, SimSettings
from baton.planner.traces.trace import Trace, TraceRequest
from baton.protos.nouns import BLOCK_TOKENS
from bench.own_time import own_time
from bench.paced_load import Answered, Arrival, drive

PROFILE = """
about = "a benchmark's: steps long enough that the processes' own time hardly counts"
kv_bytes_per_token = 64
model_kv_bytes_per_token = 64
pages = 8192
vocab_size = 32000
max_model_len = 32768
prefill_chunk = 512

[step]
fixed = {fixed}
prefill_token = {token}
prefill_pair = {pair}
decode_sequence = {sequence}
decode_context_token = {context}

[transfer]
fixed = 0.002
per_byte = 2e-8
"""
STEP = {"fixed": 0.04, "token": 0.0003, "pair": 2e-8, "sequence": 0.0005, "context": 1e-6}
LOADS = {"even": (800, 40), "long prompts": (2000, 16), "long answers": (200, 120)}
LOCAL_TOKENS = 64
BATCH = 16
WARM_RATE, WARM_S, WARM_PER_PAIR = 2.0, 3.0, 3
SHARE = 0.7
PER_CORE = 8  # processes
LEAST = 100  # requests of a load, about: of fewer the p99 is the slowest one, and a median wanders
TTFT_S, TPOT_S = 2.0, 1.0
QUANTILES = (0.5, 0.99)
TARGETS = {"ttft p50": 0.1, "ttft p99": 0.2, "tpot p50": 0.1, "tpot p99": 0.2}
RATIOS = ["1:1", "3:1", "1:3", "4:4", "8:8"]


class Row(msgspec.Struct, frozen=True):
    """One workload on one ratio: observed and simulated seconds, by figure."""

    load: str
    ratio: str
    requests: int
    failed: int
    observed: dict[str, float]
    simulated: dict[str, float]
    overhead: Overhead = Overhead()
    slow: float = 1.0
    cores_busy: float = 0.0  # by this cluster's processes and its client, of all cores, over the load

    @property
    def errors(self) -> dict[str, float]:
        """Relative, of the simulated ones."""
        return {k: self.simulated[k] / v - 1 for k, v in self.observed.items() if v}

    def told(self) -> str:
        """Observed, simulated and error."""
        return "  ".join(
            f"{k} {self.observed[k]:.4f}/{self.simulated[k]:.4f} {e:+.1%}"
            + ("" if abs(e) <= TARGETS[k] else " MISSED")
            for k, e in self.errors.items()
        )

    @property
    def missed(self) -> list[str]:
        """The figures that are further off than their target, and requests that failed."""
        found = [k for k, e in self.errors.items() if abs(e) > TARGETS[k]]
        return [*found, "failed"] if self.failed else found


def profile_text(slow: float) -> str:
    """Returns the profile by which the workers step, ``slow`` times as slow."""
    return PROFILE.format(**{name: seconds * slow for name, seconds in STEP.items()})


def report(rows: list[Row], out: str | None, **about: object) -> int:
    """Print what was missed, write rows with their targets. Exit status 0 when every figure is inside."""
    count = sum(len(row.errors) for row in rows)
    missed = [
        f"{row.load} {row.ratio} {what} {row.errors.get(what, 0):+.1%}" for row in rows for what in row.missed
    ]
    print(f"{len(missed)} missed of {count} figures: {'; '.join(missed) or 'none'}")
    if out:
        found = [msgspec.to_builtins(r) | {"errors": r.errors, "missed": r.missed} for r in rows]
        text = msgspec.json.encode({**about, "targets": TARGETS, "rows": found})
        Path(out).write_bytes(msgspec.json.format(text, indent=1) + b"\n")
    return 1 if missed else 0


def slowness(prefill: int, decode: int, cores: int) -> int:
    """Returns how many times as slow these workers, with router, Redis and client, must be on ``cores`` cores."""
    return max(1, math.ceil((2 * (prefill + decode) + 3) / (PER_CORE * cores)))


def rate_of(workers: WorkerLimits, load: tuple[int, int], prefill: int, decode: int) -> float:
    """Requests per second that fill the fuller role to SHARE."""
    prompt, answer = load
    readable = prefill * BURSTS / workers.prompt_seconds(prompt, prompt * prompt / 2)
    writable = decode * capacity(workers, prompt + answer / 2) / answer
    return SHARE * min(readable, writable)


def arrivals(load: tuple[int, int], rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Returns Poisson arrivals whose lengths lie within a third of the mean."""
    rng, found, at = random.Random(seed), [], 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        prompt, answer = (round(mean * rng.uniform(0.67, 1.33)) for mean in load)
        found.append(Arrival(at, 0, prompt, answer))
    return found


def simulated(
    costs: WorkerCosts, load: list[Arrival], sent: list[float], prefill: int, decode: int
) -> dict[str, float]:
    """The figures of the twin; ``sent``: when each was really sent."""
    chunk = WorkerConfig().prefill_chunk_tokens
    settings = SimSettings(
        prefill, decode, max_batch=BATCH, prefill_chunk=chunk, decode_chunk=chunk, local_max_tokens=LOCAL_TOKENS,
        stepwise=True,
    )  # fmt: skip
    pairs = sorted(zip(sent, load, strict=True), key=lambda pair: pair[0])
    requests = tuple(TraceRequest(at, a.prompt, a.answer) for at, a in pairs)
    sim = ClusterSim(ClusterScenario(settings, costs, costs, Trace("load", requests)))
    sim.run()
    served = [f for f in sim.flights if not f.refused]
    return figures([ttft(f) for f in served], [tpot(f) for f in served if f.outputs > 1])


def observed(answers: list[Answered]) -> dict[str, float]:
    """The figures of what clients saw."""
    return figures(
        [a.ttft_s for a in answers if a.ttft_s is not None], [a.tpot_s for a in answers if a.tpot_s is not None]
    )


def figures(first: list[float], steps: list[float]) -> dict[str, float]:
    """TTFT and TPOT at each quantile."""
    named = {"ttft": sorted(first), "tpot": sorted(steps)}
    return {f"{name} p{q * 100:.0f}": percentile(values, q) for name, values in named.items() for q in QUANTILES}


def cpu_seconds(fleet: Fleet) -> float:
    """Returns the CPU seconds of every process that takes part, this one included."""
    records = [fleet.record(slot) for slot in fleet.slots]
    router = fleet.router.pid if fleet.router else None
    pids = [os.getpid(), router, fleet.redis_pid, *(pid for r in records for pid in (r.pid, r.engine_pid))]
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids if pid]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def run(
    folder: Path, names: list[str], prefill: int, decode: int, seconds: float, seed: int, slow: float = 1.0
) -> Iterator[Row]:
    """The workloads on one ratio, one after the other; ``seconds`` of each, before ``slow``, and LEAST requests."""
    profile = folder / "sim.toml"
    profile.write_text(profile_text(slow))
    paced, costs, chunk = load_profile(str(profile)), from_paced(str(profile)), WorkerConfig().prefill_chunk_tokens
    pages = paced.pages * BLOCK_TOKENS
    workers = WorkerLimits(paced.step, paced.step, chunk, BATCH, pages, TTFT_S * slow, TPOT_S * slow)
    with Fleet(
        cluster={"prefill": prefill, "decode": decode},
        worker={"device": f"paced:{profile}", "max_batch": BATCH},
        router={"local_prefill_max_tokens": LOCAL_TOKENS},
        controller={"mode": "off"},
    ) as fleet:
        warming = WARM_RATE * max(prefill, decode) / slow
        warm = arrivals(LOADS["even"], warming, max(WARM_S, WARM_PER_PAIR * prefill * decode / warming), seed + 1)
        asyncio.run(drive(fleet, warm, "warm"))  # curves are learned, pairs are connected and measured
        own = own_time(fleet, costs, chunk)
        told = msgspec.structs.replace(costs, overhead=own)
        for name in names:
            load = LOADS[name]
            rate = rate_of(workers, load, prefill, decode)
            asked = arrivals(load, rate, max(seconds * slow, LEAST / rate), seed)
            since, spent = time.monotonic(), cpu_seconds(fleet)
            answers = asyncio.run(drive(fleet, asked, f"measured {name}"))  # no prompt begins as another load's
            busy = (cpu_seconds(fleet) - spent) / (time.monotonic() - since) / (os.cpu_count() or 1)
            found = simulated(told, asked, [a.sent for a in answers], prefill, decode)
            failed = sum(bool(a.failed) for a in answers)
            yield Row(name, f"{prefill}:{decode}", len(answers), failed, observed(answers), found, own, slow, busy)


def main() -> int:
    """Exit status 0 when every p50 is within 10% and every p99 within 20%."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ratios", nargs="*", default=RATIOS)
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--slow", type=float, default=0.0, help="times as slow in all; default: by cores")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="JSON file for the figures")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ratio in args.ratios:
            prefill, decode = (int(part) for part in ratio.split(":"))
            slow = args.slow or slowness(prefill, decode, os.cpu_count() or 1)
            for row in run(Path(folder), args.loads, prefill, decode, args.seconds, args.seed, slow):
                rows.append(row)
                own = "/".join(f"{s * 1e3:.1f}" for s in msgspec.structs.astuple(row.overhead))
                about = (
                    f"n={row.requests} failed={row.failed} slow={slow:g} cores={row.cores_busy:.0%} own={own} ms"
                )
                print(f"{row.load:>13} {ratio}  {about}  {row.told()}", flush=True)
    return report(rows, args.out, seconds=args.seconds)


if __name__ == "__main__":
    sys.exit(main())
