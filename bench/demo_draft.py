"""Measures what drafts bring to the demo model on text that it was not trained on: look-ups, its draft model, both.

The real loop writes real answers to passages of ``models/demo/heldout.txt``, in turns with and without drafts, and
ratios are within a round. Knows nothing of clusters.

    python -m bench.demo_draft [--batches 1,8] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from tokenizers import Tokenizer

from baton.bench.rows import Row, interval, median, table, to_json
from baton.cluster.served_model import DEMO
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner
from baton.engine.speculate.draft import BatchSpeculator, Draft
from baton.engine.speculate.draft_model import DraftModel
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.judge import Writer
from baton.engine.steps.parts import EngineParts
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import BLOCK_TOKENS, EngineRequest, Sampling
from baton.worker.drafts import make_drafter
from baton.worker.spec import EngineSpec
from bench.speculation_loop import Tape

PROMPT, TOKENS = 64, 128  # of each answer
DEPTHS = (1, 2, 4)
DRAFT = DEMO.parent / "demo-draft"
NAMES = ("auto", f"draft:{DRAFT}", f"auto+draft:{DRAFT}")
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, max_tokens=TOKENS, ignore_eos=True),
    "temperature 0.8": Sampling(temperature=0.8, seed=1, max_tokens=TOKENS, ignore_eos=True),
}


class Always(Drafter):
    """Verifies ``depth`` tokens of a draft model, or of heads, after each step, whatever that costs."""

    def __init__(self, model: BatchSpeculator, depth: int) -> None:
        super().__init__([model])
        self._model, self._depth = model, depth

    def plan(self, writers: Sequence[Writer], prompt_tokens: int = 0, limit_s: float = 0.0) -> dict[int, Draft]:
        """Returns a draft for everybody who has room for one."""
        self._forget_ended()
        able = [writer for writer in writers if writer.draft_room > 0]
        if able:
            self._model.prepare(able, self._depth)
        drafts = {one.seq: self._model.propose(one, min(self._depth, one.draft_room)) for one in able}
        return {seq: draft for seq, draft in drafts.items() if draft is not None and draft.tokens}


class Run(NamedTuple):
    """Holds the tokens per second of one run, and the answers."""

    rate: float
    answers: dict[int, int]


class Demo:
    """Holds the model, and room for ``most`` answers at once."""

    def __init__(self, most: int) -> None:
        self.runner: Runner = load_runner(EngineConfig(str(DEMO)))
        self.pages = most * (PROMPT + TOKENS) // BLOCK_TOKENS * 2 + 64
        self._buffer = bytearray(self.pages * self.runner.spec.layout.page_bytes)
        self.runner.bind(memoryview(self._buffer), self.pages)
        text = (DEMO / "heldout.txt").read_text()
        self.ids: list[int] = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids
        self._keys = 0

    def drafter(self, name: str) -> Drafter:
        """Returns a new worker's drafter."""
        found = make_drafter(name, EngineSpec(model=str(DEMO)), self.runner, self.pages)
        assert found is not None
        return found

    def always(self, depth: int) -> Drafter:
        """Returns what verifies ``depth`` tokens of the draft model in each step."""
        (model,) = self.drafter(f"draft:{DRAFT}")._speculators
        assert isinstance(model, DraftModel)
        return Always(model, depth)

    def passages(self, batch: int, seed: int) -> list[list[int]]:
        """Returns the beginnings of ``batch`` answers' texts."""
        rng = random.Random(seed)
        places = [rng.randrange(len(self.ids) - PROMPT) for _ in range(batch)]
        return [self.ids[at : at + PROMPT] for at in places]

    def run(self, prompts: Sequence[list[int]], sampling: Sampling, drafter: Drafter | None) -> Run:
        """Reads the prompts, then times the answers."""
        tape = Tape()
        parts = EngineParts.around(self.runner, PagePool(self.pages), tape, time.monotonic)
        loop = DecodeLoop(parts, DecodeLimits(chunk_tokens=1 << 16), random.Random(0).randbytes, drafter)
        for prompt in prompts:
            self._keys += 1
            request = EngineRequest(f"r{self._keys}", tuple(prompt), PROMPT, sampling)
            loop.take(ch.Admit(self._keys, request, True, 0.0))
        while len(tape.tokens) < len(prompts):
            loop.turn([])
        before, began = sum(tape.tokens.values()), time.perf_counter()
        while not loop.empty:
            loop.turn([])
        seconds = time.perf_counter() - began
        return Run((sum(tape.tokens.values()) - before) / seconds, tape.tokens)


def rows_of(demo: Demo, batch: int, rounds: int) -> Iterator[Row]:
    """Yields speed over none and acceptance, by kind of sampling and of drafts."""
    for kind, sampling in SAMPLINGS.items():
        drafters = {name.replace(str(DRAFT), DRAFT.name): demo.drafter(name) for name in NAMES}
        drafters |= {f"{depth} of {DRAFT.name} in each step": demo.always(depth) for depth in DEPTHS}
        for name, drafter in drafters.items():
            ratios = list(_ratios(demo, batch, rounds, sampling, drafter))
            low, high = interval(ratios)
            yield Row(f"batch {batch}, {kind}, {name}", median(ratios), "x of none", low=low, high=high)
            tally = drafter.tally
            share = tally.accepted / tally.verified if tally.verified else 0.0
            yield Row(f"batch {batch}, {kind}, {name}: accepted of {tally.verified} verified", share, "")


def _ratios(demo: Demo, batch: int, rounds: int, sampling: Sampling, drafter: Drafter) -> Iterator[float]:
    """Yields the speed over none of each round behind as many in which it is found out what pays."""
    for at in range(2 * rounds):
        prompts = demo.passages(batch, at)
        before, drafted, after = (demo.run(prompts, sampling, one) for one in (None, drafter, None))
        if at >= rounds:
            yield 2 * drafted.rate / (before.rate + after.rate)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    demo, rows = Demo(max(batches)), list[Row]()
    for batch in batches:
        rows += (found := list(rows_of(demo, batch, args.rounds)))
        Console(width=150).print(table(found))
    if args.json:
        args.json.write_text(to_json(rows) + "\n")


if __name__ == "__main__":
    main()
