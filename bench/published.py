"""Compares what others published with what this simulator says of the same inputs.

    .venv/bin/python -m bench.published distserve [--runs 40] [--ttft 2.5] [--mixed] [--spreads 0.3 0.5 0.7]
    .venv/bin/python -m bench.published splitwise --trace azure_2023_conversation.csv [--scale 1.0] [--seconds 30]
        [--systems AA HH HA HHcap] [--written theirs] [--out FILE]

distserve: Table 2 (OPT-66B, ShareGPT), share of requests within both SLOs. DistServe-Low is one prefill instance
and a decode instance of two pipeline stages: two groups of requests go round it in turn, each step of a group as
long as both stages together, so it is two decode workers with half of the memory each. vLLM of 2023 reads
whole prompts while its writers wait (``--mixed``: it does both in one step). Published are the curves, how many
requests a run had (an overloaded system's share depends on it) and, in an early commit of the artifact, the lengths
of 1,600 requests, from which each run draws; ``--spreads`` draws log-normal ones of the published means instead.
Each figure is the mean of ``--runs`` runs, with one run's standard deviation. ``--ttft``: another SLO, in seconds.

splitwise: which split into prompt and token machines carries the most requests per second within the power of 40
DGX-H100 (conversation lengths of Azure's trace at a Poisson rate), every one of the paper's nine SLOs met.
``--scale`` takes a part of the power. ``--written theirs`` takes a decode step as splitwise-sim does: its table of
times by prompt tokens is looked up with the number of sequences, so that a batch costs next to nothing.

Nothing is real here but the published figures and what the simulator runs of the product.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from baton.planner.costs.worker import WorkerCosts
from baton.planner.score import Slo, score, tpot, ttft
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim, SimSettings
from baton.planner.simulator.flight import Flight
from baton.planner.traces.trace import Trace, TraceRequest, read_trace
from baton.protos.measurements import TransferCurve

DATA = Path(__file__).parent / "data" / "published.toml"
LENGTHS = DATA.with_name("sharegpt_lengths.csv")
FREE = TransferCurve(0.0, 0.0)
QUANTILES = (50, 90, 99)
STEPS = 5  # of the search for the highest rate


def main() -> int:
    """Print and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    serving = kinds.add_parser("distserve")
    serving.add_argument("--runs", type=int, default=40)
    serving.add_argument("--requests", type=int, default=0, help="of a run; 0: as published")
    serving.add_argument("--ttft", type=float, default=0.0, help="SLO in seconds; 0: the artifact's")
    serving.add_argument("--mixed", action="store_true", help="vLLM's writers don't wait while it reads")
    serving.add_argument("--spreads", type=float, nargs="*", help="draw lengths with this deviation over the mean")
    split = kinds.add_parser("splitwise")
    split.add_argument("--trace", required=True)
    split.add_argument("--scale", type=float, default=1.0)
    split.add_argument("--seconds", type=float, default=30.0)
    split.add_argument("--systems", nargs="*", default=["AA", "HH", "HA", "HHcap"])
    split.add_argument("--written", choices=["measured", "theirs"], default="measured")
    for each in (serving, split):
        each.add_argument("--seed", type=int, default=1)
        each.add_argument("--out")
    asked = parser.parse_args()
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))[asked.kind]
    rows = list(distserve(data, asked) if asked.kind == "distserve" else splitwise(data, asked))
    if asked.out:
        Path(asked.out).write_text(json.dumps(rows, indent=1))
    return 0


# ---- DistServe, Table 2 ------------------------------------------------------------------------------------


Length = tuple[int, int]
Lengths = Callable[[random.Random], Length]
System = tuple[SimSettings, WorkerCosts, WorkerCosts]


def distserve(data: dict[str, Any], asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per kind of lengths and rate, printed as it comes."""
    slo = Slo(asked.ttft or data["ttft_s"], data["tpot_s"])
    systems = ((vllm_2023(data, not asked.mixed), "vllm_requests"), (distserve_low(data), "requests"))
    for name, lengths in kinds_of_lengths(data, asked.spreads or ()):
        late = 100 * late_alone(data, lengths, slo.ttft_s)
        print(
            f"{name}, TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s; late on an idle vLLM: {late:.0f}% of requests"
        )
        print("   rate  vLLM real/theirs/ours              DistServe real/theirs/ours")
        for rate, *published in data["table"]:
            ours = []
            for system, key in systems:
                count, seeds = asked.requests or data[key], range(asked.seed, asked.seed + asked.runs)
                ours.append(attainment(system, slo, [poisson(lengths, rate, n, 16, count) for n in seeds]))
            yield {"lengths": name, "ttft_s": slo.ttft_s, "rate": rate, "published": published, "ours": ours}
            (a, b, c, d), ((v, dv), (s, ds)) = published, ours
            print(
                f"{rate:7.1f}  {a:5.1f} {b:5.1f} {v:5.1f} ±{dv:4.1f} {v - a:+6.1f}   "
                f"{c:6.1f} {d:5.1f} {s:5.1f} ±{ds:4.1f} {s - c:+6.1f}",
                flush=True,
            )


def kinds_of_lengths(data: dict[str, Any], spreads: Sequence[float]) -> Iterator[tuple[str, Lengths]]:
    """The artifact's, or drawn ones of each spread."""
    if not spreads:
        with LENGTHS.open(encoding="utf-8", newline="") as file:
            known = [(int(row["prompt"]), int(row["output"])) for row in csv.DictReader(file)]
        yield "the artifact's lengths", lambda rng: rng.choice(known)
    for spread in spreads:
        yield f"spread {spread:g}", lambda rng, spread=spread: _drawn_pair(rng, data, spread)  # type: ignore[misc]


def late_alone(data: dict[str, Any], lengths: Lengths, ttft_s: float, count: int = 10_000) -> float:
    """The share of prompts that vLLM's own curve says are late even when nothing else is there."""
    _, costs, _ = vllm_2023(data, True)
    rng = random.Random(0)
    prompts = (lengths(rng)[0] for _ in range(count))
    return sum(costs.step_seconds(n, n * n / 2, 0, 0.0) > ttft_s for n in prompts) / count


def attainment(system: System, slo: Slo, runs: Sequence[Trace]) -> tuple[float, float]:
    """Returns the mean share of requests within the SLOs over the runs, in percent, and one run's standard
    deviation.
    """
    found = [attained(*system, trace, slo) for trace in runs]
    return fmean(found), pstdev(found)


def attained(settings: SimSettings, reads: WorkerCosts, writes: WorkerCosts, trace: Trace, slo: Slo) -> float:
    """Percent of the requests of ``trace``."""
    sim = ClusterSim(ClusterScenario(settings, reads, writes, trace))
    sim.run()
    return 100 * score(sim.flights, slo, trace.duration).attainment


def _drawn_pair(rng: random.Random, data: dict[str, Any], spread: float) -> Length:
    """Log-normal lengths with the published means, as far as the cut at the model's length leaves them."""
    while True:
        prompt, output = (_drawn(rng, data[name], spread) for name in ("prompt_mean", "output_mean"))
        if prompt + output <= data["longest"]:
            return prompt, output


def _drawn(rng: random.Random, mean: float, spread: float) -> int:
    """Log-normal of that mean; ``spread`` is its deviation over its mean."""
    sigma = math.sqrt(math.log(1 + spread * spread))
    return max(2, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))


def distserve_low(data: dict[str, Any]) -> System:
    """One prefill instance, and the decode instance as two workers."""
    settings = SimSettings(
        1, 2, "least_loaded", max_batch=1024, prefill_chunk=data["prefill_chunk"], local_max_tokens=0
    )
    extra = data["token_extra"]
    a, b, c = data["prefill"]
    reads = _costs("prefill", a + data["prefill_extra"], b + extra, 2 * c, 0.0, 0.0, data["prefill_tokens"])
    a, b, c = data["decode"]
    writes = _costs("decode", a + data["decode_extra"], 0.0, 0.0, c, b + extra, data["decode_tokens"] // 2)
    return settings, reads, writes


def vllm_2023(data: dict[str, Any], writers_wait: bool) -> System:
    """One colocated worker that reads whole prompts."""
    settings = SimSettings(
        0, 1, "least_loaded", max_batch=1024, decode_chunk=data["vllm_chunk"], writers_wait=writers_wait
    )
    extra = data["token_extra"]
    (_, token, pair), (a, b, c) = data["vllm_prefill"], data["vllm_decode"]
    costs = _costs("vllm", a + data["decode_extra"], token + extra, 2 * pair, c, b + extra, data["vllm_tokens"])
    return settings, costs, costs


def _costs(
    about: str, fixed: float, token: float, pair: float, sequence: float, context: float, kv_tokens: int
) -> WorkerCosts:
    """Returns a worker's costs from figures in milliseconds."""
    token, pair, sequence, context = (x / 1e3 for x in (token, pair, sequence, context))
    return WorkerCosts(about, fixed / 1e3, 0.0, token, pair, sequence, context, kv_tokens, 1, FREE, written=0.0)


# ---- Splitwise, machine counts -----------------------------------------------------------------------------


def splitwise(data: dict[str, Any], asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per system, printed as it comes."""
    lengths = [(r.input_length, r.output_length) for r in read_trace(asked.trace).requests]
    for name in asked.systems:
        system = data["systems"][name]
        reads, writes = (machine(data, system[side], asked.written) for side in ("reads", "writes"))
        found: dict[tuple[int, int], float] = {}
        for split in splits(system, asked.scale):
            found[split] = highest_rate(data, split, reads, writes, lengths, asked)
            print(f"  {name:6s} {split[0]:3d}P{split[1]:3d}D  {found[split]:6.1f} requests/s", flush=True)
        best = max(found, key=lambda split: found[split])
        published = tuple(round(n * asked.scale) for n in system["published"])
        there = found.get(published)
        print(f"{name:6s} published {published}  ours {best}: {found[best]:.1f}/s; there {there or 0:.1f}/s")
        yield {
            "system": name, "published": published, "ours": best, "rate": found[best], "rate_there": there,
            "all": [[*split, rate] for split, rate in found.items()],
        }  # fmt: skip


def splits(system: dict[str, Any], scale: float) -> list[tuple[int, int]]:
    """Machines that read and write within the power, around the published: where a search need look."""
    (p, d), (reads, writes) = system["published"], system["power"]
    power, step = (p * reads + d * writes) * scale, max(1, round(2 * scale))
    middle = round(p * scale)
    found = [
        (n, int((power - n * reads) / writes + 0.01)) for n in range(middle - 4 * step, middle + 4 * step + 1, step)
    ]
    return [(n, m) for n, m in found if n >= 1 and m >= 1]


def machine(data: dict[str, Any], name: str, written: str) -> WorkerCosts:
    """Fitted to the measured medians."""
    prompt, token = np.array(data[name]["prompt"]), np.array(data[name]["token"])
    n, weight = prompt[:, 0], 1 / prompt[:, 1]
    rows = np.stack([np.ones_like(n), n, n * n / 2], axis=1) * weight[:, None]
    fixed, each, pair = np.linalg.lstsq(rows, np.ones(len(n)), rcond=None)[0]
    slope, base = np.polyfit(token[:, 0], token[:, 1], 1)
    sequence = float(slope) if written == "measured" else 0.0
    start = float(base) if written == "measured" else float(token[0, 1])
    return WorkerCosts(
        name, start / 1e3, max(0.0, float(fixed) - start) / 1e3, float(each) / 1e3, max(0.0, float(pair)) / 1e3,
        sequence / 1e3, 0.0, data["kv_tokens"], data["kv_bytes_per_token"],
        TransferCurve(0.0, 1 / data["network_bytes_per_s"]), written=0.0,
    )  # fmt: skip


def highest_rate(
    data: dict[str, Any],
    split: tuple[int, int],
    reads: WorkerCosts,
    writes: WorkerCosts,
    lengths: Sequence[tuple[int, int]],
    asked: argparse.Namespace,
) -> float:
    """Requests per second that meet every SLO, by halving."""
    settings = SimSettings(
        *split,
        policy="least_loaded",
        max_batch=data["batch"],
        prefill_chunk=data["batch_tokens"],
        local_max_tokens=0,
    )
    alone = machine(data, "a100", "measured")
    low, high = 0.0, 8.0 * sum(split)
    for _ in range(STEPS + 3):
        rate = (low + high) / 2
        trace = poisson(lambda rng: rng.choice(lengths), rate, asked.seed, 512, seconds=asked.seconds)
        sim = ClusterSim(ClusterScenario(settings, reads, writes, trace))
        sim.run()
        low, high = (rate, high) if keeps(data, sim.flights, alone) else (low, rate)
    return low


def poisson(
    lengths: Lengths, rate: float, seed: int, block: int, count: int = 1 << 30, seconds: float = math.inf
) -> Trace:
    """Returns a Poisson trace of ``count`` requests or ``seconds`` seconds; their KV is held in blocks of
    ``block`` tokens.
    """
    rng, at = random.Random(seed), 0.0
    requests: list[TraceRequest] = []
    while len(requests) < count and (at := at + rng.expovariate(rate)) < seconds:
        requests.append(TraceRequest(at, *lengths(rng)))
    return Trace("poisson", tuple(requests), block_tokens=block)


def keeps(data: dict[str, Any], flights: Sequence[Flight], alone: WorkerCosts) -> bool:
    """Returns whether median, p90 and p99 of every slowdown (over an idle DGX-A100) are within their bounds."""
    slow: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
    step = alone.step_seconds(0, 0.0, 1, 0.0)
    for flight in flights:
        if flight.refused:
            return False
        read = alone.step_seconds(flight.prompt, flight.prompt**2 / 2, 0, 0.0)
        slow["ttft"].append(ttft(flight) / read)
        slow["e2e"].append((flight.last_token - flight.arrival) / (read + (flight.outputs - 1) * step))
        if flight.outputs > 1:
            slow["tpot"].append(tpot(flight) / step)
    return all(
        np.percentile(values, q) <= bound
        for name, values in slow.items()
        for q, bound in zip(QUANTILES, data[f"{name}_slowdown"], strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
