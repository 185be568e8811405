"""The simulator against the real CPU engine at 1P1D: the same arrivals through a model and through modelled time.

    .venv/bin/python -m bench.sim_vs_cpu [--model DIR] [--seconds 60] [--loads even] [--share 0.4] [--out FILE]

Both workers, the router and the client have the same cores. So what the simulator is fed with is measured first, on
the cluster itself: what steps take *alone* (requests one after another, then batches of answers: the workers fit
their curves to those steps), what of a request is neither step nor transfer, and how many times as long each role's
steps take *beside* the other's (prompts one after another while answers are written). Nothing of a load is fitted.
Each load is then sent, and simulated with the times at which its requests were really sent: p50 within 10%, p99
within 20%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

import msgspec

from baton.bench.engine.start import write_checkpoint
from baton.cluster.config import WorkerConfig
from baton.cluster.membership import PolledRoster, WorkerEntry, connect
from baton.cluster.served_model import DEMO
from baton.controller.pressure import WorkerLimits
from baton.cost.profiles import Overhead
from baton.launch.fleet import Fleet
from baton.planner.costs.worker import WorkerCosts, from_curve
from baton.planner.score import tpot, ttft
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim, SimSettings
from baton.planner.simulator.flight import Flight
from baton.planner.simulator.shared_cores import CoreSharing
from baton.planner.traces.trace import Trace, TraceRequest
from baton.protos.errors import StartupError
from baton.protos.measurements import TransferCurve
from baton.protos.nouns import BLOCK_TOKENS
from bench import sim_vs_paced
from bench.paced_load import Answered, Arrival, drive
from bench.sim_vs_paced import BATCH, LOCAL_TOKENS, Row, arrivals, figures, report

SIZE = "150M"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
LOADS = {"even": (160, 20), "long prompts": (480, 8), "long answers": (100, 50)}
BEAT_S = 1.0
ALONE, LONGEST = 60, 640  # requests that are measured alone, and their prompts' most tokens
BATCHES = (2, 4, 8, 16, 4, 8)
SHORT, WRITTEN = LOCAL_TOKENS - 4, 200  # read where they are written: nobody else computes
PROMPT, STREAMS, STREAM_TOKENS = 480, 4, 500
WORDS = 64
SPACE = "\u0120"  # how byte-level tokenizers write it


class Machine(msgspec.Struct, frozen=True):
    """Holds what was measured before the loads: each role's costs alone, and the effect of running together."""

    reads: WorkerCosts
    writes: WorkerCosts
    sharing: CoreSharing

    def told(self) -> str:
        """Returns the figures as one line."""
        own, sharing = self.reads.overhead, self.sharing
        return (
            f"alone: {PROMPT} tokens read in {self.prompt_s * 1e3:.0f} ms, a step of one answer"
            f" {self.step_s(1) * 1e3:.1f} ms, of {STREAMS} {self.step_s(STREAMS) * 1e3:.1f} ms; a request's own"
            f" {own.request * 1e3:.1f} ms, a step's {own.step * 1e3:.2f} ms; beside each other reading takes"
            f" {sharing.prefill:.2f} and writing {sharing.decode:.2f} times as long"
        )

    @property
    def prompt_s(self) -> float:
        """A prompt of PROMPT tokens, alone."""
        return reading(self.reads, PROMPT)

    def step_s(self, sequences: int, context: float = SHORT + WRITTEN / 2) -> float:
        """A decode step of so many."""
        return self.writes.step_seconds(0, 0.0, sequences, sequences * context) + self.writes.overhead.step


def reading(costs: WorkerCosts, tokens: int) -> float:
    """Seconds of a prompt's steps, alone."""
    steps = -(-tokens // WorkerConfig().prefill_chunk_tokens)
    return costs.step_seconds(tokens, tokens * tokens / 2, 0, 0.0) + (steps - 1) * costs.fixed


def shipping(costs: WorkerCosts, tokens: int) -> float:
    """Seconds from a prompt's last step until all of it is there: its last chunk goes when that is read."""
    last = (tokens - 1) % WorkerConfig().prefill_chunk_tokens + 1
    return costs.transfer.fixed + last * costs.kv_bytes_per_token * costs.transfer.per_byte


def curves(fleet: Fleet) -> dict[str, WorkerEntry]:
    """Returns the workers' entries by role. Raises StartupError while one of them has no curve."""

    async def read() -> dict[str, WorkerEntry]:
        redis = connect(fleet.config.redis.url)
        try:
            found = await PolledRoster(redis, fleet.config.cluster.namespace).refresh()
        finally:
            await redis.aclose()
        return {entry.info.role: entry for entry in found.values()}

    found = asyncio.run(read())
    if len(found) < 2 or any(entry.load.step_curve is None for entry in found.values()):
        raise StartupError(f"no curves of both roles yet: {', '.join(found)}")
    return found


def costs(entry: WorkerEntry, transfer: TransferCurve) -> WorkerCosts:
    """A worker's own curve in the simulator's form."""
    curve, info = entry.load.step_curve, entry.info
    assert curve is not None, "curves() has seen it"
    per_token = info.layout.page_bytes // BLOCK_TOKENS
    return from_curve(info.worker_id, curve, info.pages * BLOCK_TOKENS, per_token, transfer)


def simulated(machine: Machine, load: list[Arrival], sent: list[float]) -> list[Flight]:
    """Plays the same requests in modelled time."""
    chunk = WorkerConfig().prefill_chunk_tokens
    settings = SimSettings(
        1, 1, max_batch=BATCH, prefill_chunk=chunk, decode_chunk=chunk, local_max_tokens=LOCAL_TOKENS, stepwise=True
    )
    pairs = sorted(zip(sent, load, strict=True), key=lambda pair: pair[0])
    trace = Trace("load", tuple(TraceRequest(at, a.prompt, a.answer) for at, a in pairs))
    sim = ClusterSim(ClusterScenario(settings, machine.reads, machine.writes, trace, sharing=machine.sharing))
    sim.run()
    return sim.flights


class Vocabulary(msgspec.Struct, frozen=True):
    """Holds the number of tokens and ids of some that are a word each.

    A client sees a token once it has text: of a character's first bytes, which random weights like to write, it
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


async def _drive(fleet: Fleet, load: list[Arrival], name: str, vocabulary: Vocabulary) -> list[Answered]:
    return await drive(fleet, load, name, vocab=vocabulary.size, only=vocabulary.words)


def measured(fleet: Fleet, vocabulary: Vocabulary, seed: int) -> Machine:
    """Alone first, so that the workers' curves are of that alone; then beside each other."""
    rng = random.Random(seed)
    asked = [Arrival(0.0, 0, rng.randrange(LOCAL_TOKENS + 2, LONGEST), rng.randrange(2, 48)) for _ in range(ALONE)]
    answers = [asyncio.run(_drive(fleet, [a], f"alone {i}", vocabulary))[0] for i, a in enumerate(asked)]
    for count in BATCHES:
        together = [Arrival(0.0, 0, SHORT, WRITTEN)] * count
        asyncio.run(_drive(fleet, together, f"together {count}", vocabulary))
    asyncio.run(asyncio.sleep(BEAT_S))
    seen = curves(fleet)
    transfer = seen["prefill"].load.transfer_curve or TransferCurve(1e-3, 0.0)
    reads, writes = costs(seen["prefill"], transfer), costs(seen["decode"], transfer)
    own = overhead(reads, writes, list(zip(asked, answers, strict=True)))
    reads, writes = (msgspec.structs.replace(c, overhead=own) for c in (reads, writes))
    alone = Machine(reads, writes, CoreSharing(1.0, 1.0))
    return msgspec.structs.replace(alone, sharing=asyncio.run(beside(fleet, alone, vocabulary)))


def overhead(reads: WorkerCosts, writes: WorkerCosts, answers: list[tuple[Arrival, Answered]]) -> Overhead:
    """Returns what requests that were alone took beyond their steps and their transfer."""
    first = [
        a.ttft_s - reading(reads, asked.prompt) - shipping(reads, asked.prompt)
        for asked, a in answers
        if a.ttft_s is not None
    ]
    between = [
        a.tpot_s - writes.step_seconds(0, 0.0, 1, asked.prompt + asked.answer / 2)
        for asked, a in answers
        if a.tpot_s is not None
    ]
    return Overhead(max(0.0, median(first)), 0.0, max(0.0, median(between)))


async def beside(fleet: Fleet, alone: Machine, vocabulary: Vocabulary) -> CoreSharing:
    """Prompts are read one after another while answers are written, until the answers end."""
    writing = asyncio.create_task(
        _drive(fleet, [Arrival(0.0, 0, SHORT, STREAM_TOKENS)] * STREAMS, "streams", vocabulary)
    )
    first: list[float] = []
    while not writing.done():
        (answer,) = await _drive(fleet, [Arrival(0.0, 0, PROMPT, 1)], f"beside {len(first)}", vocabulary)
        if answer.ttft_s is not None and not writing.done():
            first.append(answer.ttft_s)
    steps = [a.tpot_s for a in await writing if a.tpot_s is not None]
    if not first or not steps:
        raise StartupError("nothing was read while answers were written: --seconds and the model don't fit")
    step = alone.step_s(STREAMS, SHORT + STREAM_TOKENS / 2)
    own = alone.reads.overhead.request + shipping(alone.reads, PROMPT) + step / 2  # it waits for the end of a step
    return CoreSharing(max(1.0, (median(first) - own) / alone.prompt_s), max(1.0, median(steps) / step))


def run(
    fleet: Fleet, machine: Machine, vocabulary: Vocabulary, name: str, seconds: float, share: float, seed: int
) -> Row:
    """One load, seen and simulated."""
    rate = share / sim_vs_paced.SHARE * sim_vs_paced.rate_of(limits(machine), LOADS[name], 1, 1)
    load = arrivals(LOADS[name], rate, seconds, seed)
    answers = asyncio.run(_drive(fleet, load, f"{name} {seed}", vocabulary))
    flights = [f for f in simulated(machine, load, [a.sent for a in answers]) if not f.refused]
    said = figures([ttft(f) for f in flights], [tpot(f) for f in flights if f.outputs > 1])
    failed = sum(bool(a.failed) for a in answers)
    own = machine.reads.overhead
    return Row(name, "1:1", len(answers), failed, sim_vs_paced.observed(answers), said, own)


def random_model(folder: Path) -> Path:
    """A model whose steps take most of a token's time on a CPU, with the demo's tokenizer."""
    write_checkpoint(folder, SIZE)
    for name in TOKENIZER:
        shutil.copy(DEMO / name, folder)
    return folder


def limits(machine: Machine) -> WorkerLimits:
    """Returns the workers' limits, by which the rate that they carry is found."""
    pages = machine.writes.kv_tokens
    chunk = WorkerConfig().prefill_chunk_tokens
    return WorkerLimits(machine.reads.curve, machine.writes.curve, chunk, BATCH, pages, 2.0, 1.0)


def main() -> int:
    """Exit status 0 when every p50 is within 10% and every p99 within 20%."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model's directory; default: 150M random weights")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--share", type=float, default=0.4, help="of what the fuller role carries alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="JSON file for the figures")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(Path(folder))
        vocabulary = Vocabulary.of(model)
        with Fleet(
            cluster={"prefill": 1, "decode": 1},
            worker={"device": "cpu", "model": str(model), "max_batch": BATCH},
            router={"local_prefill_max_tokens": LOCAL_TOKENS},
            controller={"mode": "off"},
        ) as fleet:
            machine = measured(fleet, vocabulary, args.seed)
            print(machine.told(), flush=True)
            for name in args.loads:
                row = run(fleet, machine, vocabulary, name, args.seconds, args.share, args.seed)
                rows.append(row)
                print(f"{name:>13} n={row.requests} failed={row.failed}  {row.told()}", flush=True)
    about = {"model": args.model.name if args.model else f"{SIZE}, random weights", "share": args.share}
    return report(rows, args.out, **about, seconds=args.seconds, machine=msgspec.to_builtins(machine))


if __name__ == "__main__":
    sys.exit(main())
