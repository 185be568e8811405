"""A worker's change of role under load, the demo model: seconds from decision to serving, and requests that failed.

    .venv/bin/python -m bench.rerole [--model DIR] [--changes 12] [--rate 3] [--out FILE]

One prefill and two decode workers on the CPU engine, asked at a Poisson rate all the while. One after another,
workers turn from one role to the other and back. A change is counted by the router, from the call until the worker
serves in its new role; what it runs goes on elsewhere. Target: 2 s, and no request fails. Knows nothing of why one
would change.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from pathlib import Path

import msgspec

from baton.cluster.served_model import DEMO
from baton.launch.fleet import Fleet
from bench.flip import call
from bench.paced_load import Answered, Arrival, drive

TARGET_S = 2.0
PAUSE_S = 1.0
WARM_S = 3.0
CHANGES = (("decode-0", "prefill"), ("prefill-0", "decode"), ("prefill-0", "prefill"), ("decode-0", "decode"))


class Change(msgspec.Struct, frozen=True):
    """Seconds by the router's own clock, and as its caller saw it."""

    slot: str
    to: str
    seconds: float
    seen_s: float


class Outcome(msgspec.Struct, frozen=True):
    """All changes, and the load's requests meanwhile."""

    model: str
    changes: list[Change]
    requests: int
    failed: int
    worst_s: float
    target_s: float = TARGET_S

    @property
    def reached(self) -> bool:
        """Within the target, and nobody noticed."""
        return self.worst_s <= self.target_s and not self.failed


def load(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Prompts of 50 to 300 tokens, answers of 30 to 90."""
    rng, found, at = random.Random(seed), list[Arrival](), 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append(Arrival(at, 0, rng.randrange(50, 300), rng.randrange(30, 90)))
    return found


def outcome(model: str, changes: list[Change], answers: list[Answered]) -> Outcome:
    """Returns the figures of the run, after printing why requests failed."""
    failed = [a for a in answers if a.failed or a.ttft_s is None]
    for why in sorted({a.failed or "too late" for a in failed})[:3]:
        print(f"failed: {why}", file=sys.stderr)
    return Outcome(model, changes, len(answers), len(failed), max((c.seconds for c in changes), default=0.0))


async def change(fleet: Fleet, count: int) -> list[Change]:
    """Makes ``count`` changes of role, each followed by a pause; returns them."""
    found = []
    await asyncio.sleep(WARM_S)
    for slot, to in itertools.islice(itertools.cycle(CHANGES), count):
        since = time.monotonic()
        reply = await asyncio.to_thread(call, fleet, "POST", f"/v1/workers/{slot}/role", {"role": to})
        found.append(Change(slot, to, reply["seconds"], time.monotonic() - since))
        print(f"{slot} -> {to}: {found[-1].seconds:.2f} s", flush=True)
        await asyncio.sleep(PAUSE_S)
    return found


async def run(model: Path, count: int, rate: float, seed: int) -> Outcome:
    """The load lasts as long as the changes should take."""
    vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
    asked = load(rate, WARM_S + count * (PAUSE_S + TARGET_S / 2), seed)
    fleet = Fleet(
        cluster={"prefill": 1, "decode": 2},
        worker={"device": "cpu", "model": str(model), "threads": 1},
        router={"local_prefill_max_tokens": 16},
        controller={"mode": "off"},
    )
    with fleet:
        answers, changes = await asyncio.gather(drive(fleet, asked, "re-role", vocab=vocab), change(fleet, count))
    return outcome(model.name, changes, answers)


def main() -> int:
    """Exit status 0 when every change took 2 s at most and no request failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO, help="a model's directory; default: the demo model")
    parser.add_argument("--changes", type=int, default=12)
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="JSON file for the figures")
    args = parser.parse_args()
    found = asyncio.run(run(args.model, args.changes, args.rate, args.seed))
    print(f"worst {found.worst_s:.2f} s (target {TARGET_S:g}), {found.failed} of {found.requests} requests failed")
    if args.out:
        Path(args.out).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0 if found.reached else 1


if __name__ == "__main__":
    sys.exit(main())
