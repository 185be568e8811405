"""A load that flips from prefill-heavy to decode-heavy and back: the controller against every fixed ratio.

    .venv/bin/python -m bench.flip [--phase 14] [--workers 8] [--ratios 2 4 6] [--out bench/results/flip.json]

Real processes: one router, paced workers, Redis. Requests of the same lengths at the same times are sent to the
same cluster once for each fixed ratio (set by `POST /v1/ratio`, so by changes of role) and once with the controller
in charge, which begins at the even ratio; their tokens differ from run to run, so that no cache knows them. Three
phases of equal length: long prompts and short answers, short prompts and long answers, the first again. Time is
compressed: a phase of 14 s with a look each second stands for 70 s with one every 5 s.

A request is good when its client saw the first token within 1.5 s, and 60 ms per token after that. Goodput counts
good requests over the time in which they were sent. A request without its answer 10 s after the last was sent is
too late, and its client hangs up; more than that would be needed by none that is good.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from baton.launch.fleet import Fleet
from bench.paced_load import Answered, Arrival, drive

PROFILE = """
about = "a benchmark's: a prompt of 600 tokens takes 0.3 s, a full batch of 8 steps in 40 ms"
kv_bytes_per_token = 64
model_kv_bytes_per_token = 64
pages = 8192
vocab_size = 32000
max_model_len = 32768
prefill_chunk = 512

[step]
fixed = 0.03
prefill_token = 0.0004
prefill_pair = 0.0
decode_sequence = 0.00125
decode_context_token = 0.0

[transfer]
fixed = 0.0005
per_byte = 1e-9
"""
TTFT_S, TPOT_S = 1.5, 0.06
TAIL_S = 10.0


class Kind(msgspec.Struct, frozen=True):
    """Holds the requests of a phase: tokens in and out, and requests per second and worker."""

    name: str
    prompt: int
    answer: int
    rate: float


PREFILL_HEAVY = Kind("prefill-heavy", 600, 8, 15 / 8)
DECODE_HEAVY = Kind("decode-heavy", 24, 50, 20 / 8)
PHASES = (PREFILL_HEAVY, DECODE_HEAVY, PREFILL_HEAVY)


class Outcome(msgspec.Struct, frozen=True):
    """Holds the figures of one run."""

    name: str
    requests: int
    good: int
    failed: int
    goodput: float
    attainment: float
    by_phase: list[float]
    changes: list[dict[str, Any]] = []


def arrivals(phase_s: float, workers: int, seed: int) -> list[Arrival]:
    """Poisson within each phase."""
    rng, found = random.Random(seed), []
    for index, kind in enumerate(PHASES):
        at = index * phase_s + rng.expovariate(kind.rate * workers)
        while at < (index + 1) * phase_s:
            found.append(Arrival(at, index, round(kind.prompt * rng.uniform(0.8, 1.2)), kind.answer))
            at += rng.expovariate(kind.rate * workers)
    return found


def is_good(answered: Answered) -> bool:
    """Returns whether an answer met every SLO."""
    in_time = answered.ttft_s is not None and answered.ttft_s <= TTFT_S
    return not answered.failed and in_time and answered.tpot_s is not None and answered.tpot_s <= TPOT_S


def outcome(name: str, answers: list[Answered], phase_s: float, changes: list[dict[str, Any]]) -> Outcome:
    """Returns the run's figures, after printing why requests failed."""
    good = sum(is_good(a) for a in answers)
    for why in sorted({a.failed for a in answers if a.failed})[:3]:
        print(f"  failed: {why}", file=sys.stderr)
    phases = [[a for a in answers if a.phase == i] for i in range(len(PHASES))]
    return Outcome(
        name,
        len(answers),
        good,
        sum(bool(a.failed) for a in answers),
        good / (len(PHASES) * phase_s),
        good / max(1, len(answers)),
        [sum(is_good(a) for a in phase) / max(1, len(phase)) for phase in phases],
        changes,
    )


def call(fleet: Fleet, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON call of the router."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(fleet.url + path, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
        return found


def runs(fleet: Fleet, load: list[Arrival], phase_s: float, workers: int, ratios: list[int]) -> Iterator[Outcome]:
    """Each fixed ratio, then the controller."""
    for prefill in ratios:
        call(fleet, "POST", "/v1/ratio", {"ratio": f"{prefill}:{workers - prefill}"})
        name = f"{prefill}P{workers - prefill}D"
        yield outcome(name, asyncio.run(drive(fleet, load, name, TAIL_S)), phase_s, [])
    half = workers // 2
    call(fleet, "POST", "/v1/ratio", {"ratio": f"{half}:{workers - half}"})
    call(fleet, "POST", "/v1/ratio", {"ratio": "auto"})
    since = time.time()
    answers = asyncio.run(drive(fleet, load, "controller", TAIL_S))
    timeline = [c for c in call(fleet, "GET", "/v1/ratio")["timeline"] if c["at"] >= since]
    yield outcome("controller", answers, phase_s, list(reversed(timeline)))


def show(found: Outcome) -> None:
    """One line, and the controller's changes."""
    phases = " ".join(f"{share:6.1%}" for share in found.by_phase)
    print(
        f"{found.name:>11}  goodput {found.goodput:5.2f}/s  good {found.attainment:6.1%} of {found.requests}  "
        f"by phase {phases}  failed {found.failed}",
        flush=True,
    )
    for change in found.changes:
        if change["kind"] != "hold":
            before, after = ("{}:{}".format(*change[k]) for k in ("before", "after"))
            print(f"{'':13}{before} -> {after} in {change['seconds']:.2f} s: {change['reason']}")


def main() -> int:
    """Exit status 0 when the controller is above the best fixed ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--phase", type=float, default=14.0, help="seconds")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--ratios", type=int, nargs="*", help="prefill workers of the fixed ratios; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="JSON file for the figures")
    args = parser.parse_args()
    ratios = args.ratios or list(range(1, args.workers))
    load = arrivals(args.phase, args.workers, args.seed)
    controller = {
        "mode": "auto", "interval_s": 1.0, "window_s": 4.0, "cooldown_s": 2.0, "horizon_s": 6.0, "grace_s": 0.7,
        "ttft_s": TTFT_S, "tpot_s": TPOT_S, "dial_s": 0.0,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "flip.toml")
        profile.write_text(PROFILE)
        with Fleet(
            cluster={"prefill": args.workers // 2, "decode": args.workers - args.workers // 2},
            worker={"device": f"paced:{profile}", "max_batch": 8},
            router={"local_prefill_max_tokens": 16},
            controller=controller,
        ) as fleet:
            found = []
            for each in runs(fleet, load, args.phase, args.workers, ratios):
                show(each)
                found.append(each)
    best = max(found[:-1], key=lambda o: o.goodput)
    above = found[-1].goodput > best.goodput
    print(f"controller {found[-1].goodput:.2f}/s, best fixed ratio {best.name} {best.goodput:.2f}/s: {above=}")
    if args.out:
        Path(args.out).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0 if above else 1


if __name__ == "__main__":
    sys.exit(main())
