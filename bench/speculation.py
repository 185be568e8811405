"""Measures what speculation brings, and what it costs where it brings nothing: the real loop over a random-weight
Llama.

The model's steps are computed; what they "chose" is then replaced by a script, so that acceptance is ours to set.
Knows nothing of clusters. Runs with and without drafts go turn about, and ratios are within a round.

    python -m bench.speculation [--size 150M] [--scheme int8] [--batches 1,4,8,32] [--rounds 5] [--json FILE]
    python -m bench.speculation --quick --json FILE
    python -m bench.speculation --batches 2,16,64 --part oracle --part real --chances 0

``--quick`` takes batches 1, 8 and 32, rounds of fewer tokens, and less than twelve minutes. ``--cpu`` computes on
one thread and counts its CPU time: for a machine with other work, where no core is ours.

Parts: ``oracle`` knows the script and is right by a set chance per token, from a worker's 800th step on: tokens per
second over none, and the share of what the best fixed depth would bring by this run's own step times. ``real``: the
drafts of ``--speculation auto``, where the script repeats its prompt with some edits, as summaries with quotes and
code edits do (copied), where it repeats nothing (new), and where pairs of tokens repeat but tell nothing
(misleading). ``peer``: llama.cpp's own look-up over the same scripts beside its own decoding, on the same shape in
Q8_0, and vLLM's in bf16, at batch 1; one is left out, and says so, where ``python -m bench.peers.environments
llama_cpp vllm`` wasn't run.

The last row is the rule for making ``auto`` the default: at each batch that was measured, nothing below 0.98 of no
speculation, and no p99 between tokens above it by more than two runs without speculation differ. On a machine whose
p99 differs by more than drafts could add, the share of steps that hold drafts says more: below a hundredth, no p99
sees them.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from baton.bench.engine.models import SIZES, random_runner
from baton.bench.engine.report import SCHEMES
from baton.bench.rows import Row, interval, median, spread, table, to_json
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import Runner, SequenceStep, StepPlan, StepResult
from baton.engine.speculate.drafter import Drafter
from baton.engine.steps.loop import EngineParts
from baton.kernels.abi import native
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling
from bench.peers.lookup import looked_up, looked_up_by_vllm
from bench.speculation_drafters import Counted, Fixed, Oracle
from bench.speculation_texts import PROMPT, TOKENS, Scripts, copied, misleading, new, texts

NEVER_WORSE, OF_PERFECT = 0.98, 0.85
NOISE = 1.02  # of two 99th percentiles that are the same, at least
COPY_TARGETS = {1: 2.0, 8: 1.3}
MOST_DRAFTED = 0.01  # of the steps over text that doesn't repeat: a 99th percentile doesn't see so few


class Extent(msgspec.Struct, frozen=True):
    """Says how much is measured: rounds that count, tokens of an answer, fixed depths, chances of acceptance."""

    rounds: int
    tokens: int = TOKENS
    depths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    chances: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9)
    fixed_steps: int = 24  # of a fixed depth, whose steps' median is taken
    p99_steps: int = 1440  # that a 99th percentile is taken of, where steps are short and rounds differ by percents
    warm_steps: int = 800  # of a new worker, before it is measured with set chances of acceptance

    @property
    def warm_runs(self) -> int:
        """Returns the runs before the first round, in which a new worker finds out whether drafts pay."""
        return self.warm_steps // self.tokens

    def rounds_at(self, batch: int) -> int:
        """Returns the rounds that count: more of small batches, whose steps are short."""
        wanted = -(-self.p99_steps // self.tokens)
        return max(self.rounds, min(wanted, self.rounds * FEW_ROWS // batch))


FEW_ROWS = 16  # of a batch that takes as many rounds as were asked for
QUICK = Extent(3, 64, (1, 2, 4, 8), (0.0, 0.6, 0.9), 8, 320)
QUICK_BATCHES = "1,8,32"


class Scripted:
    """Is a runner whose choices are replaced by a script's tokens; the work is the model's.

    A step's seconds are those of ``clock``.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self.spec, self.work, self._runner, self._clock = runner.spec, runner.work, runner, clock
        self.bind, self.scripts = runner.bind, dict[int, list[int]]()
        self.took: list[float] = []

    def run(self, plan: StepPlan) -> StepResult:
        """Computes the step; each choice becomes the script's token at its position."""
        began = self._clock()
        found = self._runner.run(plan)
        self.took.append(self._clock() - began)
        tokens = iter([token for item in plan.items for token in self._tokens(item)])
        sampled = tuple([msgspec.structs.replace(one, token_id=next(tokens)) for one in found.sampled])
        return msgspec.structs.replace(found, sampled=sampled, seconds=self.took[-1])

    def _tokens(self, item: SequenceStep) -> list[int]:
        script = self.scripts[item.seq]
        return [script[spec.position - PROMPT] for spec in item.asks]


class Tape:
    """A channel that counts tokens."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}

    def send(self, message: Any) -> None:
        """Counts what a step brought."""
        if isinstance(message, ch.Tokens):
            for output in message.outputs:
                self.tokens[output.key] = self.tokens.get(output.key, 0) + len(output.run.token_ids)

    def poll(self, timeout_s: float) -> list[Any]:
        """Returns no message."""
        return []


class Timed(msgspec.Struct):
    """Holds one run: tokens per second over all sequences, and the seconds of its steps."""

    rate: float
    steps: list[float]


class Bench:
    """Runs one model; ``run`` decodes sequences until they got ``extent.tokens`` on average.

    Prompts stay in the cache, so that the runs of a round read them once.
    """

    def __init__(
        self, runner: NativeRunner, most: int, extent: Extent, cpu: bool = False, size: str = "150M"
    ) -> None:
        self.extent, self.size = extent, size
        self.clock = time.thread_time if cpu else time.perf_counter
        if cpu:
            native.set_threads(1)
        self.runner, self.pages = Scripted(runner, self.clock), most * (PROMPT + 3 * TOKENS) // 16 + 64
        self._buffer = bytearray(self.pages * runner.spec.layout.page_bytes)
        self.runner.bind(memoryview(self._buffer), self.pages)
        self._pool = PagePool(self.pages)
        self._keys = 0

    def run(self, prompts: Scripts, scripts: Scripts, drafter: Drafter | None, steps: int = 0) -> Timed:
        """Reads the prompts, then times the answers, or ``steps`` of them."""
        tape = Tape()
        parts = EngineParts.around(self.runner, self._pool, tape, time.monotonic)
        limits = DecodeLimits(chunk_tokens=1 << 16)
        loop = DecodeLoop(parts, limits, random.Random(0).randbytes, drafter)
        sampling = Sampling(temperature=0.0, max_tokens=2 * TOKENS, ignore_eos=True)
        for name, prompt in prompts.items():
            self._keys += 1
            self.runner.scripts[self._keys] = scripts[name]
            request = EngineRequest(name, tuple(prompt), PROMPT, sampling)
            loop.take(ch.Admit(self._keys, request, True, 0.0))
        while len(tape.tokens) < len(prompts):
            loop.turn([])
        found = self._timed(loop, tape, len(prompts), steps)
        for key in list(loop.requests):
            loop.take(ch.Cancel(key, "measured"))
        return found

    def _timed(self, loop: DecodeLoop, tape: Tape, count: int, steps: int) -> Timed:
        before, at = sum(tape.tokens.values()), len(self.runner.took)
        ends, began = [self.clock()], self.clock()
        while len(ends) <= steps if steps else sum(tape.tokens.values()) - before < count * self.extent.tokens:
            loop.turn([])
            ends.append(self.clock())
        rate = (sum(tape.tokens.values()) - before) / (self.clock() - began)
        assert len(self.runner.took) > at
        return Timed(rate, [b - a for a, b in itertools.pairwise(ends)])


def ratio_row(name: str, pairs: Sequence[tuple[float, float]], target: float = 0.0) -> Row:
    """Rates with and without, pair by pair of a round."""
    ratios = [mine / theirs for mine, theirs in pairs]
    low, high = interval(ratios)
    return Row(name, median(ratios), "x of none", spread=spread(ratios), target=target, low=low, high=high)


class Late:
    """Seconds of steps with speculation, and of those of two runs without."""

    def __init__(self) -> None:
        self.mine: list[float] = []
        self.theirs: tuple[list[float], list[float]] = [], []

    def add(self, drafted: Timed, before: Timed, after: Timed) -> None:
        """Adds a round's steps."""
        self.mine += drafted.steps
        self.theirs[0].extend(before.steps)
        self.theirs[1].extend(after.steps)

    def row(self, name: str) -> Row:
        """The 99th percentile between tokens over that without; at most what two without are apart."""
        before, after = map(p99, self.theirs)
        apart = max(before / after, after / before)
        value = p99(self.mine) / p99([*self.theirs[0], *self.theirs[1]])
        name = f"{name}: p99 between tokens, of {len(self.mine)} steps (none beside none: {apart:.3f})"
        return Row(name, value, "x of none", spread=apart - 1.0, target=max(NOISE, apart), ceiling=True)


def p99(seconds: Sequence[float]) -> float:
    """Returns the 99th percentile."""
    return sorted(seconds)[int(0.99 * len(seconds))]


def rule(rows: Sequence[Row]) -> Row:
    """Returns whether ``auto`` may be the default: 1 where no row says that speculation can be felt."""
    worse = [row for row in rows if (row.ceiling or row.target == NEVER_WORSE) and not row.reached]
    name = "auto may be the default" + (f"; not by: {'; '.join(row.name for row in worse)}" if worse else "")
    return Row(name, float(not worse), "(1: yes)", target=1.0)


def perfect(none: float, batch: int, fixed: dict[int, float], chance: float) -> float:
    """Returns the speed-up of the best fixed depth, none included; ``fixed`` has seconds of a step by depth."""

    def tokens(depth: int) -> float:
        return sum(chance**at for at in range(depth + 1))

    return max(1.0, *(tokens(depth) * none / seconds for depth, seconds in fixed.items()))


def oracle(bench: Bench, batch: int) -> Iterator[Row]:
    """Set chances of acceptance."""
    chances = bench.extent.chances
    oracles = {chance: Oracle({}, chance) for chance in chances}
    drafters = {chance: Drafter([known], bench.clock) for chance, known in oracles.items()}
    pairs: dict[float, list[tuple[float, float]]] = {chance: [] for chance in chances}
    shares: dict[float, list[float]] = {chance: [] for chance in chances if chance}
    late, steps = Late(), bench.extent.fixed_steps
    for at in range(bench.extent.rounds_at(batch) + 1):
        prompts, scripts = texts(batch, at, new)
        none = bench.run(prompts, scripts, None)
        fixed = {
            depth: median(bench.run(prompts, scripts, Fixed(Oracle(scripts, 0.0, at), depth), steps).steps)
            for depth in (bench.extent.depths if any(chances) else ())
        }
        for chance, drafter in drafters.items():
            oracles[chance].follow(scripts, at)
            for _ in range(0 if at else bench.extent.warm_runs):
                bench.run(prompts, scripts, drafter)
            drafted = bench.run(prompts, scripts, drafter)
            again = bench.run(prompts, scripts, None)
            before, none = none, again
            if not at:
                continue
            base = (before.rate + again.rate) / 2
            pairs[chance].append((drafted.rate, base))
            if chance:
                best = perfect(median(before.steps), batch, fixed, chance)
                shares[chance].append(drafted.rate / base / best)
            else:
                late.add(drafted, before, again)
    for chance, found in pairs.items():
        yield ratio_row(f"batch {batch}, acceptance {chance}", found, 0.0 if chance else NEVER_WORSE)
        if chance:
            low, high = interval(shares[chance])
            name = f"batch {batch}, acceptance {chance}: share of the best fixed depth's speed-up"
            yield Row(name, median(shares[chance]), "", target=OF_PERFECT, low=low, high=high)
    yield late.row(f"batch {batch}, acceptance 0.0")


def real(bench: Bench, batch: int) -> Iterator[Row]:
    """The drafts of ``--speculation auto`` over three kinds of text."""
    for kind, target in ((copied, COPY_TARGETS.get(batch, 0.0)), (new, NEVER_WORSE), (misleading, NEVER_WORSE)):
        drafter, found = Counted(bench.clock), list[tuple[float, float]]()
        late = Late()
        for at in range(bench.extent.rounds_at(batch) + 1):
            prompts, scripts = texts(batch, 1000 + at, kind)
            before = bench.run(prompts, scripts, None)
            drafted = bench.run(prompts, scripts, drafter)
            after = bench.run(prompts, scripts, None)
            if at:
                found.append((drafted.rate, (before.rate + after.rate) / 2))
                late.add(drafted, before, after)
        yield ratio_row(f"batch {batch}, {kind.__name__} text", found, target)
        if kind is not copied:
            yield late.row(f"batch {batch}, {kind.__name__} text")
            name = f"batch {batch}, {kind.__name__} text: steps with drafts, of {drafter.steps}"
            yield Row(name, drafter.drafted / drafter.steps, "of steps", target=MOST_DRAFTED, ceiling=True)


def peer(bench: Bench, batch: int) -> Iterator[Row]:
    """Peers' look-ups over the same scripts, one sequence at a time; nothing of those that aren't set up."""
    if batch != 1:
        return
    kinds = (copied, new, misleading)
    for name, ask in PEERS.items():
        rounds = bench.extent.rounds + 1
        runs = {kind: [texts(1, 1000 + at, kind) for at in range(rounds)] for kind in kinds}
        asked = [
            (prompts[one], scripts[one]) for kind in kinds for prompts, scripts in runs[kind] for one in prompts
        ]
        found = ask(bench.size, asked, bench.extent.tokens)
        for at, kind in enumerate(kinds if found else ()):
            ratios = [without / drafted for without, drafted in (found or ())[at * rounds + 1 : (at + 1) * rounds]]
            low, high = interval(ratios)
            yield Row(f"{name}, {kind.__name__} text", median(ratios), "x of its none", low=low, high=high)


PEERS = {"llama.cpp's look-up (Q8_0)": looked_up, "vLLM's look-up (bf16)": looked_up_by_vllm}
PARTS: dict[str, Callable[[Bench, int], Iterator[Row]]] = {"oracle": oracle, "real": real, "peer": peer}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="150M")
    parser.add_argument("--scheme", choices=SCHEMES, default="int8")
    parser.add_argument("--batches", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--chances", default="", help="of acceptance, of the part oracle: 0 for the rule alone")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(batch) for batch in (args.batches or (QUICK_BATCHES if args.quick else "1,4,8,32")).split(",")]
    extent = QUICK if args.quick else Extent(args.rounds)
    if args.chances:
        extent = msgspec.structs.replace(extent, chances=tuple(map(float, args.chances.split(","))))
    runner, console = random_runner(args.size, args.scheme, "bf16")[0], Console(width=150)
    bench = Bench(runner, max(batches), extent, args.cpu, args.size)
    rows = list[Row]()
    for batch in batches:
        for part in args.part or PARTS:
            found = list(PARTS[part](bench, batch))
            if found:
                console.print(table(found))
            rows += found
    rows.append(rule(rows))
    console.print(table(rows[-1:]))
    if args.json:
        args.json.write_text(to_json(rows) + "\n")


if __name__ == "__main__":
    main()
