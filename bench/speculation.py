"""Measures what speculation brings, and what it costs where it brings nothing: the real loop over a random-weight
Llama.

The model's steps are computed; what they "chose" is then replaced by a script, so that acceptance is ours to set.
Knows nothing of clusters. Runs with and without drafts go turn about, and ratios are within a round.

    python -m bench.speculation [--size 150M] [--scheme int8] [--batches 1,4,8,32] [--rounds 5] [--json FILE]
    python -m bench.speculation --quick --json FILE
    python -m bench.speculation --batches 2,16,64 --part oracle --part real --part tail --chances 0

``--quick`` takes batches 1, 8 and 32, rounds of fewer tokens, and less than twelve minutes. ``--cpu`` computes on
one thread and counts its CPU time: for a machine with other work, where no core is ours.

Parts: ``oracle`` knows the script and is right by a set chance per token, from a worker's 800th step on: tokens per
second over none, and the share of what the best fixed depth would bring by this run's own step times. ``real``: the
drafts of ``--speculation auto``, where the script repeats its prompt with some edits, as summaries with quotes and
code edits do (copied), where it repeats nothing (new), and where pairs of tokens repeat but tell nothing
(misleading). ``tail``: the p99 between tokens where drafts bring nothing, of loops with and without drafts that
step in turn (``bench/speculation_tail.py``). ``peer``: llama.cpp's own look-up over the same scripts beside its own
decoding, on the same shape in Q8_0, and vLLM's in bf16, at batch 1; one is left out, and says so, where
``python -m bench.peers.environments llama_cpp vllm`` wasn't run.

The last row is the rule for making ``auto`` the default: at each batch that was measured, nothing below 0.98 of no
speculation, and no p99 between tokens above it by more than two loops without speculation differ. Of the steps over
text that doesn't repeat, less than a hundredth holds drafts: a p99 sees no fewer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from baton.bench.engine.models import SIZES, random_runner
from baton.bench.engine.report import SCHEMES
from baton.bench.rows import Row, interval, median, spread, table, to_json
from baton.engine.speculate.drafter import Drafter
from bench.peers.lookup import looked_up, looked_up_by_vllm
from bench.speculation_drafters import Counted, Fixed, Oracle
from bench.speculation_loop import Bench, Extent
from bench.speculation_tail import LOOPS, pooled, tail
from bench.speculation_texts import copied, misleading, new, texts

NEVER_WORSE, OF_PERFECT = 0.98, 0.85
COPY_TARGETS = {1: 2.0, 8: 1.3}
MOST_DRAFTED = 0.01  # of the steps over text that doesn't repeat: a 99th percentile doesn't see so few
QUICK = Extent(3, 64, (1, 2, 4, 8), (0.0, 0.6, 0.9), 8, 320, tail_steps=960)
QUICK_BATCHES = "1,8,32"


def ratio_row(name: str, pairs: Sequence[tuple[float, float]], target: float = 0.0) -> Row:
    """Rates with and without, pair by pair of a round."""
    ratios = [mine / theirs for mine, theirs in pairs]
    low, high = interval(ratios)
    return Row(name, median(ratios), "x of none", spread=spread(ratios), target=target, low=low, high=high)


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
    steps = bench.extent.fixed_steps
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
    for chance, found in pairs.items():
        yield ratio_row(f"batch {batch}, acceptance {chance}", found, 0.0 if chance else NEVER_WORSE)
        if chance:
            low, high = interval(shares[chance])
            name = f"batch {batch}, acceptance {chance}: share of the best fixed depth's speed-up"
            yield Row(name, median(shares[chance]), "", target=OF_PERFECT, low=low, high=high)


def real(bench: Bench, batch: int) -> Iterator[Row]:
    """The drafts of ``--speculation auto`` over three kinds of text."""
    for kind, target in ((copied, COPY_TARGETS.get(batch, 0.0)), (new, NEVER_WORSE), (misleading, NEVER_WORSE)):
        drafter, found = Counted(bench.clock), list[tuple[float, float]]()
        for at in range(bench.extent.rounds_at(batch) + 1):
            prompts, scripts = texts(batch, 1000 + at, kind)
            before = bench.run(prompts, scripts, None)
            drafted = bench.run(prompts, scripts, drafter)
            after = bench.run(prompts, scripts, None)
            if at:
                found.append((drafted.rate, (before.rate + after.rate) / 2))
        yield ratio_row(f"batch {batch}, {kind.__name__} text", found, target)
        if kind is not copied:
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
PARTS: dict[str, Callable[[Bench, int], Iterator[Row]]] = {
    "oracle": oracle,
    "real": real,
    "tail": tail,
    "peer": peer,
}


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
    parts = args.part or list(PARTS)
    bench = Bench(runner, max(batches), extent, args.cpu, args.size, loops=LOOPS if "tail" in parts else 1)
    rows = list[Row]()
    for batch in batches:
        for part in parts:
            found = list(PARTS[part](bench, batch))
            if found:
                console.print(table(found))
            rows += found
    last = [*pooled(rows)]
    last.append(rule([*rows, *last]))
    console.print(table(last))
    rows += last
    if args.json:
        args.json.write_text(to_json(rows) + "\n")


if __name__ == "__main__":
    main()
