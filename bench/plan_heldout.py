"""The ratio chosen on the first half of a trace, on its second half, against every ratio there.

    .venv/bin/python -m bench.plan_heldout --trace TRACE --profile roofline:llama-3-70b@a800x8 --workers 16 \
        [--ttft 10] [--tpot 0.1] [--faster 1] [--seconds 1800] [--out FILE]

The choice is that of `baton plan` on the first half (a ratio, or colocated); the second half is simulated on every
ratio and colocated. The figure is the share of requests within their SLOs that the choice gives up against the best
there: requests, not requests per second, because a ratio that leaves some unanswered may end sooner. Nothing is
real here but the trace and what the simulator runs of the product. The same figures on any machine, however busy.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from baton.planner.costs.worker import worker_costs
from baton.planner.plan import chosen_of
from baton.planner.score import Slo
from baton.planner.simulator.cluster import ClusterScenario, SimSettings
from baton.planner.sweep import at_ratio, ratio_name, simulate, sweep
from baton.planner.traces.trace import Trace, read_trace

TARGET, WANT = 0.03, 0.9


class HeldOut(msgspec.Struct, frozen=True):
    """``chosen`` on the first half; the second half's requests within their SLOs by ratio, ``best`` with the most.

    No prefill worker: colocated.
    """

    trace: str
    requests: tuple[int, int]
    chosen: tuple[int, int]
    best: tuple[int, int]
    good: dict[str, int]
    lost: float


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """Returns the first and the second half of the trace, by time."""
    middle = trace.duration / 2
    return trace.between(0.0, middle), trace.between(middle, trace.duration + 1.0)


def held_out(trace: Trace, profile: str, workers: int, slo: Slo) -> HeldOut:
    """Choose on one half, judge on the other."""
    settings, costs = SimSettings(1, workers - 1), worker_costs(profile)
    first, second = halves(trace)
    chosen = chosen_of(sweep(workers, ClusterScenario(settings, costs, costs, first), slo)[0])
    unseen = ClusterScenario(settings, costs, costs, second)
    judged = [simulate(at_ratio(unseen, p, workers - p), slo) for p in range(workers)]
    best = max(judged, key=lambda r: r.score.good)
    ours = next(r for r in judged if r.prefill == chosen.prefill)
    return HeldOut(
        trace.source,
        (len(first.requests), len(second.requests)),
        (chosen.prefill, chosen.decode),
        (best.prefill, best.decode),
        {r.name: r.score.good for r in judged},
        1 - ours.score.good / best.score.good if best.score.good else 0.0,
    )


def main() -> int:
    """Exit status 0 when no more than 3% is given up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", required=True)
    parser.add_argument("--profile", default="roofline:llama-3-70b@a800x8")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--ttft", type=float, default=10.0)
    parser.add_argument("--tpot", type=float, default=0.1)
    parser.add_argument("--faster", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=0.0, help="of the trace, from its begin; 0: all")
    parser.add_argument("--out", help="JSON file for the figures")
    args = parser.parse_args()
    trace = read_trace(args.trace).faster(args.faster)
    if args.seconds:
        trace = trace.between(0.0, args.seconds)
    found = held_out(trace, args.profile, args.workers, Slo(args.ttft, args.tpot))
    marked = {"chosen": ratio_name(*found.chosen), "best": ratio_name(*found.best)}
    for name, good in found.good.items():
        marks = [mark for mark, at in marked.items() if name == at]
        print(f"{name:>12}  {good:6d} within their SLOs  {', '.join(marks)}")
    print(f"the choice gives up {found.lost:.2%} of the best's, on {found.requests[1]} requests it hasn't seen")
    if args.out:
        Path(args.out).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0 if found.lost <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
