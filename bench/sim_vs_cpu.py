"""The simulator against the real CPU engine at 1P1D: the same arrivals through a model and through modelled time.

    .venv/bin/python -m bench.sim_vs_cpu [--model DIR] [--seconds 40] [--loads even] [--share 0.4] [--out FILE]

Two loads of each kind are sent in turns of a few seconds, so that whatever the machine does meanwhile is done to
both. The first calibrates: the workers fit their curves to their own steps, so with both of them, the router and
the client on the same cores. What the simulator is off by, request for request, is what it doesn't model: HTTP,
gRPC, detokenizing, and how cores that are shared delay some requests and not others. The other load has other
arrivals and other lengths. To what the simulator says of each of its requests are added the differences of those of
the first load that were simulated to take about as long, and that is held against what was seen: p50 within 10%,
p99 within 20%. Nothing of the second load is fitted. Prompts and answers are short, so that a load has many
requests: a p99 of forty is their slowest one. All of it takes six minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from baton.cluster.config import WorkerConfig
from baton.cluster.membership import Entry, Roster, connect
from baton.console.enginebench.start import write_checkpoint
from baton.deploy.fleet import Fleet
from baton.deploy.plans import DEMO
from baton.planner.cluster_sim import ClusterSim, Scenario, SimSettings
from baton.planner.costs import WorkerCosts, from_curve
from baton.planner.figures import percentile
from baton.planner.flight import Flight
from baton.planner.pressure import Workers
from baton.planner.score import tpot, ttft
from baton.planner.traces import Trace, TraceRequest
from baton.protos.errors import StartupError
from baton.protos.nouns import BLOCK_TOKENS, TransferCurve
from bench import sim_vs_paced
from bench.paced_load import Answered, Arrival, drive
from bench.sim_vs_paced import BATCH, LOCAL_TOKENS, Row, arrivals, figures, report

SIZE = "150M"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
LOADS = {"even": (160, 20), "long prompts": (480, 8), "long answers": (100, 50)}
WARM_S, BEAT_S, TURN_S = 8.0, 1.0, 10.0
APART = 100  # turns are simulated so many times further apart: each ended before the next began
WORDS = 64
SPACE = "\u0120"  # how byte-level tokenizers write it
ALIKE = 4  # a request is like the nearest one in so many of the calibration's


class Unmodelled(msgspec.Struct, frozen=True):
    """Of each request of a load, simulated seconds and what was seen beyond: first token, and per token after."""

    first: list[tuple[float, float]]
    token: list[tuple[float, float]]

    def told(self) -> str:
        """Median and most, in milliseconds."""
        named = (("until the first token", self.first), ("per token", self.token))
        parts = []
        for name, of in named:
            rest = sorted(more for _, more in of)
            parts.append(f"{name} {percentile(rest, 0.5) * 1e3:.1f} ms, {percentile(rest, 1.0) * 1e3:.1f} at most")
        return "not modelled: " + "; ".join(parts)


class Compared(Row, frozen=True):
    """A row, and what was added to each of the simulator's requests."""

    unmodelled: Unmodelled | None = None


def curves(fleet: Fleet) -> dict[str, Entry]:
    """What the workers tell of themselves now, by role. Raises StartupError while one has no curve."""

    async def read() -> dict[str, Entry]:
        redis = connect(fleet.config.redis.url)
        try:
            found = await Roster(redis, fleet.config.cluster.namespace).refresh()
        finally:
            await redis.aclose()
        return {entry.info.role: entry for entry in found.values()}

    found = asyncio.run(read())
    if len(found) < 2 or any(entry.load.step_curve is None for entry in found.values()):
        raise StartupError(f"no curves of both roles yet: {', '.join(found)}")
    return found


def costs(entry: Entry, transfer: TransferCurve) -> WorkerCosts:
    """A worker's own curve in the simulator's form."""
    curve, info = entry.load.step_curve, entry.info
    assert curve is not None, "curves() has seen it"
    per_token = info.layout.page_bytes // BLOCK_TOKENS
    return from_curve(info.worker_id, curve, info.pages * BLOCK_TOKENS, per_token, transfer)


def simulated(seen: dict[str, Entry], load: list[Arrival], sent: list[float]) -> list[Flight]:
    """The same requests in modelled time."""
    transfer = seen["prefill"].load.transfer_curve or TransferCurve(1e-3, 0.0)
    reads, writes = costs(seen["prefill"], transfer), costs(seen["decode"], transfer)
    chunk = WorkerConfig().prefill_chunk_tokens
    settings = SimSettings(
        1, 1, max_batch=BATCH, prefill_chunk=chunk, decode_chunk=chunk, local_max_tokens=LOCAL_TOKENS, stepwise=True
    )
    pairs = sorted(zip(sent, load, strict=True), key=lambda pair: pair[0])
    trace = Trace("load", tuple(TraceRequest(at, a.prompt, a.answer) for at, a in pairs))
    sim = ClusterSim(Scenario(settings, reads, writes, trace))
    sim.run()
    return sim.flights


def unmodelled(answers: list[Answered], flights: list[Flight]) -> Unmodelled:
    """What each was seen to take over what was simulated; ``flights`` are in the order in which they were sent."""
    pairs = list(zip(sorted(answers, key=lambda a: a.sent), flights, strict=True))
    return Unmodelled(
        [(ttft(f), a.ttft_s - ttft(f)) for a, f in pairs if a.ttft_s is not None and not f.refused],
        [(tpot(f), a.tpot_s - tpot(f)) for a, f in pairs if a.tpot_s is not None and not f.refused],
    )


def corrected(simulated_s: list[float], known: list[tuple[float, float]]) -> list[float]:
    """Each simulated time with the differences of the calibration's nearest."""
    count = max(1, len(known) // ALIKE)
    found: list[float] = []
    for seconds in simulated_s:
        nearest = sorted(known, key=lambda pair: abs(pair[0] - seconds))[:count]
        found += [seconds + more for _, more in nearest]
    return found


def expected(flights: list[Flight], rest: Unmodelled) -> dict[str, float]:
    """The figures of every simulated request, corrected."""
    served = [f for f in flights if not f.refused]
    return figures(
        corrected([ttft(f) for f in served], rest.first),
        corrected([tpot(f) for f in served if f.outputs > 1], rest.token),
    )


class Vocabulary(msgspec.Struct, frozen=True):
    """How many tokens there are, and ids of some that are a word each.

    A client sees a token when it has text. Of a character's first bytes, which random weights like to write, it
    sees nothing until the rest is there or the answer ends.
    """

    size: int
    words: list[int]

    @classmethod
    def of(cls, model: Path) -> Vocabulary:
        """The tokenizer's in a model's directory."""
        pieces: dict[str, int] = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        words = [
            i
            for piece, i in pieces.items()
            if piece.startswith(SPACE) and piece[1:].isalpha() and piece[1:].isascii()
        ]
        return cls(len(pieces), sorted(words)[:WORDS])


def in_turns(
    fleet: Fleet, loads: list[list[Arrival]], seconds: float, vocabulary: Vocabulary
) -> list[tuple[list[Arrival], list[Answered]]]:
    """Each load's requests, TURN_S of one and TURN_S of the other; times go on as if a turn followed the last."""
    found: list[tuple[list[Arrival], list[Answered]]] = [([], []) for _ in loads]
    for turn in range(max(1, round(seconds / TURN_S))):
        for i, load in enumerate(loads):
            start = turn * TURN_S
            part = [a for a in load if start <= a.at < start + TURN_S]
            moved = [msgspec.structs.replace(a, at=a.at - start) for a in part]
            answers = asyncio.run(_drive(fleet, moved, f"turn {turn} of {i}", vocabulary))
            found[i][0].extend(part)
            found[i][1].extend(msgspec.structs.replace(a, sent=a.sent + start * APART) for a in answers)
    return found


async def _drive(fleet: Fleet, load: list[Arrival], name: str, vocabulary: Vocabulary) -> list[Answered]:
    return await drive(fleet, load, name, vocab=vocabulary.size, only=vocabulary.words)


def run(model: Path, name: str, seconds: float, share: float, seed: int) -> Compared:
    """One kind of load: calibrate, then compare."""
    vocabulary = Vocabulary.of(model)
    with Fleet(
        cluster={"prefill": 1, "decode": 1},
        worker={"device": "cpu", "model": str(model), "max_batch": BATCH},
        router={"local_prefill_max_tokens": LOCAL_TOKENS},
        controller={"mode": "off"},
    ) as fleet:
        asyncio.run(_drive(fleet, arrivals(LOADS[name], 1.0, WARM_S, seed), "warm", vocabulary))
        rate = share / sim_vs_paced.SHARE * sim_vs_paced.rate_of(limits(curves(fleet)), LOADS[name], 1, 1)
        loads = [arrivals(LOADS[name], rate, seconds, seed + i) for i in (1, 2)]
        (first, calibrated), (second, answers) = in_turns(fleet, loads, seconds, vocabulary)
        asyncio.run(asyncio.sleep(BEAT_S))
        seen = curves(fleet)
    rest = unmodelled(calibrated, simulated(seen, first, [a.sent for a in calibrated]))
    flights = simulated(seen, second, [a.sent for a in answers])
    said = expected(flights, rest)
    failed = sum(bool(a.failed) for a in answers)
    seen_by_clients = sim_vs_paced.observed(answers)
    return Compared(name, "1:1", len(answers), failed, seen_by_clients, said, unmodelled=rest)


def random_model(folder: Path) -> Path:
    """A model whose steps take most of a token's time on a CPU, with the demo's tokenizer."""
    write_checkpoint(folder, SIZE)
    for name in TOKENIZER:
        shutil.copy(DEMO / name, folder)
    return folder


def limits(seen: dict[str, Entry]) -> Workers:
    """For the rate that such workers carry."""
    reads, writes = seen["prefill"].load.step_curve, seen["decode"].load.step_curve
    assert reads is not None
    assert writes is not None
    pages = seen["decode"].info.pages * BLOCK_TOKENS
    return Workers(reads, writes, WorkerConfig().prefill_chunk_tokens, BATCH, pages, 2.0, 1.0)


def main() -> int:
    """Exit status 0 when every p50 is within 10% and every p99 within 20%."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model's directory; default: 150M random weights")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each load")
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--share", type=float, default=0.4, help="of what the fuller role carries")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="JSON file for the figures")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(Path(folder))
        for name in args.loads:
            row = run(model, name, args.seconds, args.share, args.seed)
            rows.append(row)
            print(f"{name:>13} n={row.requests} failed={row.failed}  {row.told()}", flush=True)
            print(f"{'':>13} {row.unmodelled.told() if row.unmodelled else ''}", flush=True)
    about = {"model": args.model.name if args.model else f"{SIZE}, random weights", "share": args.share}
    return report(rows, args.out, **about, seconds=args.seconds)


if __name__ == "__main__":
    sys.exit(main())
