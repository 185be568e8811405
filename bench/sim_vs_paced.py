"""The simulator against the paced engine: the same arrivals through real processes and through modelled time.

    .venv/bin/python -m bench.sim_vs_paced [--seconds 20] [--ratios 1:1 3:1 1:3 4:4 8:8] [--loads even] [--out FILE]

Three workloads (even, long prompts, long answers) times five ratios; a cluster is started once per ratio. The real
side is a router, paced workers and Redis, asked over HTTP by a client per request; the simulator is fed with the
profile that the workers step by, and with the times at which the requests were really sent. Rates scale with what
the ratio can carry (70% of its fuller role). Errors are of TTFT and TPOT at p50 and p99. Processes share this
machine's cores: on a busy one, the real side is late, and that is in the errors.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from baton.cluster.config import WorkerConfig
from baton.cost.profiles import load_profile
from baton.deploy.fleet import Fleet
from baton.planner.cluster_sim import ClusterSim, Scenario, SimSettings
from baton.planner.costs import from_paced
from baton.planner.figures import percentile
from baton.planner.pressure import BURSTS, Workers, capacity
from baton.planner.score import tpot, ttft
from baton.planner.traces import Trace, TraceRequest
from baton.protos.nouns import BLOCK_TOKENS
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
fixed = 0.04
prefill_token = 0.0003
prefill_pair = 2e-8
decode_sequence = 0.0005
decode_context_token = 1e-6

[transfer]
fixed = 0.002
per_byte = 2e-8
"""
LOADS = {"even": (800, 40), "long prompts": (2000, 16), "long answers": (200, 120)}
LOCAL_TOKENS = 64
BATCH = 16
WARM_RATE, WARM_S, WARM_PER_PAIR = 2.0, 3.0, 3
SHARE = 0.7
QUANTILES = (0.5, 0.99)
RATIOS = ["1:1", "3:1", "1:3", "4:4", "8:8"]


class Row(msgspec.Struct, frozen=True):
    """One workload on one ratio: observed and simulated seconds, by figure."""

    load: str
    ratio: str
    requests: int
    failed: int
    observed: dict[str, float]
    simulated: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Relative, of the simulated ones."""
        return {k: self.simulated[k] / v - 1 for k, v in self.observed.items() if v}

    def told(self) -> str:
        """Observed, simulated and error."""
        return "  ".join(
            f"{k} {self.observed[k]:.4f}/{self.simulated[k]:.4f} {e:+.1%}" for k, e in self.errors.items()
        )


def rate_of(workers: Workers, load: tuple[int, int], prefill: int, decode: int) -> float:
    """Requests per second that fill the fuller role to SHARE."""
    prompt, answer = load
    readable = prefill * BURSTS / workers.prompt_seconds(prompt, prompt * prompt / 2)
    writable = decode * capacity(workers, prompt + answer / 2) / answer
    return SHARE * min(readable, writable)


def arrivals(load: tuple[int, int], rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson; lengths within a third of the mean."""
    rng, found, at = random.Random(seed), [], 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        prompt, answer = (round(mean * rng.uniform(0.67, 1.33)) for mean in load)
        found.append(Arrival(at, 0, prompt, answer))
    return found


def simulated(profile: str, load: list[Arrival], sent: list[float], prefill: int, decode: int) -> dict[str, float]:
    """The figures of the twin; ``sent``: when each was really sent."""
    costs = from_paced(profile)
    chunk = WorkerConfig().prefill_chunk_tokens
    settings = SimSettings(
        prefill, decode, max_batch=BATCH, prefill_chunk=chunk, decode_chunk=chunk, local_max_tokens=LOCAL_TOKENS,
        stepwise=True,
    )  # fmt: skip
    pairs = sorted(zip(sent, load, strict=True), key=lambda pair: pair[0])
    requests = tuple(TraceRequest(at, a.prompt, a.answer) for at, a in pairs)
    sim = ClusterSim(Scenario(settings, costs, costs, Trace("load", requests)))
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


def run(profile: str, names: list[str], prefill: int, decode: int, seconds: float, seed: int) -> Iterator[Row]:
    """The workloads on one ratio, one after the other."""
    paced, chunk = load_profile(profile), WorkerConfig().prefill_chunk_tokens
    workers = Workers(paced.step, paced.step, chunk, BATCH, paced.pages * BLOCK_TOKENS, 2.0, 1.0)
    with Fleet(
        cluster={"prefill": prefill, "decode": decode},
        worker={"device": f"paced:{profile}", "max_batch": BATCH},
        router={"local_prefill_max_tokens": LOCAL_TOKENS},
        controller={"mode": "off"},
    ) as fleet:
        rate = WARM_RATE * max(prefill, decode)
        warm = arrivals(LOADS["even"], rate, max(WARM_S, WARM_PER_PAIR * prefill * decode / rate), seed + 1)
        asyncio.run(drive(fleet, warm, "warm"))  # curves are learned, pairs are connected and measured
        for name in names:
            load = LOADS[name]
            asked = arrivals(load, rate_of(workers, load, prefill, decode), seconds, seed)
            answers = asyncio.run(drive(fleet, asked, f"measured {name}"))  # no prompt begins as another load's
            found = simulated(profile, asked, [a.sent for a in answers], prefill, decode)
            failed = sum(bool(a.failed) for a in answers)
            yield Row(name, f"{prefill}:{decode}", len(answers), failed, observed(answers), found)


def main() -> int:
    """Exit status 0 when every p50 is within 10% and every p99 within 20%."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ratios", nargs="*", default=RATIOS)
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="JSON file for the figures")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "sim.toml")
        profile.write_text(PROFILE)
        for ratio in args.ratios:
            prefill, decode = (int(part) for part in ratio.split(":"))
            for row in run(str(profile), args.loads, prefill, decode, args.seconds, args.seed):
                rows.append(row)
                parts = [
                    f"{k} {row.observed[k]:.3f}/{row.simulated[k]:.3f} {e:+.1%}" for k, e in row.errors.items()
                ]
                print(
                    f"{row.load:>13} {ratio}  n={row.requests} failed={row.failed}  " + "  ".join(parts), flush=True
                )
    worst = {k: max(abs(r.errors.get(k, 0.0)) for r in rows) for k in rows[0].observed}
    print("worst: " + "  ".join(f"{k} {e:.1%}" for k, e in worst.items()))
    if args.out:
        found = [msgspec.to_builtins(r) | {"errors": r.errors} for r in rows]
        Path(args.out).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0 if all(e <= (0.1 if k.endswith("p50") else 0.2) for k, e in worst.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
