"""Trains Medusa heads beside the demo model, on a CPU in minutes, and measures what their drafts bring.

No trained heads come with the repository. These learn from what the demo model itself writes behind passages of
three quarters of ``models/demo/heldout.txt``, as Medusa's self-distillation does
(https://arxiv.org/abs/2401.10774). Each head guesses the token that stands some places further on, from the model's
last hidden state. They are written as published (``medusa_lm_head.safetensors``), so ``--speculation medusa:DIR``
takes them. What they bring is measured on answers to passages of the last quarter.

    python -m bench.demo_medusa DIR [--answers 1024] [--epochs 3] [--batches 1,8] [--rounds 5] [--json FILE]

Where DIR has heads already, they are measured and not trained again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from baton.bench.rows import Row, interval, median, table, to_json
from baton.cluster.served_model import DEMO
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.abilities import internals_of
from baton.engine.plan import SequenceStep, StepPlan
from baton.engine.speculate.draft import BatchSpeculator
from baton.engine.speculate.drafter import Drafter
from baton.engine.steps.parts import EngineParts
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling
from bench.demo_draft import PROMPT, SAMPLINGS, TOKENS, Always, Demo

HEADS = 3
AT_ONCE = 32  # answers that are written side by side
ROWS, RATE = 512, 1e-3  # of a step of training
TRAINED_ON = 0.75  # of the held-out text, from its beginning
FILE = "medusa_lm_head.safetensors"


class Text:
    """Is a channel that keeps the tokens of answers, by key."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def send(self, message: Any) -> None:
        """Keeps what a step brought."""
        for output in message.outputs if isinstance(message, ch.Tokens) else ():
            self.tokens.setdefault(output.key, []).extend(output.run.token_ids)

    def poll(self, timeout_s: float) -> list[Any]:
        """Returns [], because nobody asks this engine from outside."""
        return []


class Heads:
    """Holds HEADS heads as published: x + SiLU(Wx + b), then a matrix to the vocabulary, which begins as ``out``
    (vocab, hidden).
    """

    def __init__(self, out: Tensor) -> None:
        hidden = out.shape[1]
        self.weights = [torch.zeros(hidden, hidden, requires_grad=True) for _ in range(HEADS)]
        self.biases = [torch.zeros(hidden, requires_grad=True) for _ in range(HEADS)]
        self.outs = [out.clone().requires_grad_() for _ in range(HEADS)]

    def logits(self, head: int, states: Tensor) -> Tensor:
        """Returns the logits (rows, vocab) of one head."""
        return F.linear(states + F.silu(F.linear(states, self.weights[head], self.biases[head])), self.outs[head])

    def parameters(self) -> list[Tensor]:
        """Returns everything that is trained."""
        return [*self.weights, *self.biases, *self.outs]

    def save(self, directory: Path) -> None:
        """Writes config.json and the tensors by FasterDecoding's names, in bf16."""
        named = {"0.linear.weight": self.weights, "0.linear.bias": self.biases, "1.weight": self.outs}
        tensors = {f"{at}.{name}": each[at] for name, each in named.items() for at in range(HEADS)}
        directory.mkdir(parents=True, exist_ok=True)
        config = {"medusa_num_heads": HEADS, "medusa_num_layers": 1, "base_model_name_or_path": DEMO.name}
        (directory / "config.json").write_text(json.dumps(config) + "\n")
        save_file({name: p.detach().to(torch.bfloat16) for name, p in tensors.items()}, directory / FILE)


def passages(demo: Demo, count: int, seed: int, trained_on: bool) -> list[list[int]]:
    """Returns the beginnings of texts of the part that is trained on, or of the rest."""
    ids, rng = demo.ids, random.Random(seed)
    edge = int(len(ids) * TRAINED_ON)
    first, last = (0, edge - PROMPT) if trained_on else (edge, len(ids) - PROMPT)
    return [ids[at : at + PROMPT] for at in (rng.randrange(first, last) for _ in range(count))]


def written(demo: Demo, count: int) -> list[list[int]]:
    """Returns ``count`` passages, each with what the model writes behind it: of three answers two are drawn."""
    found = list[list[int]]()
    while len(found) < count:
        prompts = passages(demo, min(AT_ONCE, count - len(found)), len(found), trained_on=True)
        text = Text()
        parts = EngineParts.around(demo.runner, PagePool(demo.pages), text, time.monotonic)
        loop = DecodeLoop(parts, DecodeLimits(chunk_tokens=1 << 16), random.Random(0).randbytes, None)
        for key, prompt in enumerate(prompts):
            heat = 0.8 if key % 3 else 0.0
            how = Sampling(temperature=heat, seed=len(found) + key, max_tokens=TOKENS, ignore_eos=True)
            loop.take(ch.Admit(key, EngineRequest(f"r{key}", tuple(prompt), PROMPT, how), True, 0.0))
        while not loop.empty:
            loop.turn([])
        found += [prompt + text.tokens[key] for key, prompt in enumerate(prompts)]
    return found


def examples(demo: Demo, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Returns the model's last hidden states in its answers, (rows, hidden) float32, and the tokens that its heads
    are to guess there, (rows, HEADS).
    """
    inside = internals_of(demo.runner)
    assert inside is not None
    inside.tap((inside.layers,), every_row=True)
    states, wanted = list[Tensor](), list[Tensor]()
    for seq, text in enumerate(texts):
        pages = list(range(-(-len(text) // 16)))
        found = demo.runner.run(StepPlan((SequenceStep(seq, list(text), 0, pages),))).states[seq]
        rows = range(PROMPT - 1, len(text) - 1 - HEADS)
        states.append(torch.from_numpy(found[rows.start : rows.stop].copy()))
        ahead = torch.tensor(list(text))
        wanted.append(torch.stack([ahead[rows.start + 2 + at : rows.stop + 2 + at] for at in range(HEADS)], 1))
    inside.tap((), every_row=False)
    return torch.cat(states), torch.cat(wanted)


def train(out: Tensor, states: Tensor, wanted: Tensor, epochs: int, rate: float = RATE) -> Heads:
    """Returns heads for a model whose head is ``out``, after ``epochs`` passes over the examples."""
    torch.manual_seed(0)
    heads, steps = Heads(out), epochs * -(-len(states) // ROWS)
    optimizer = torch.optim.AdamW(heads.parameters(), rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, rate / 20)
    for _ in range(epochs):
        for rows in torch.randperm(len(states)).split(ROWS):
            with torch.autocast("cpu", torch.bfloat16):
                each = [F.cross_entropy(heads.logits(at, states[rows]), wanted[rows, at]) for at in range(HEADS)]
            optimizer.zero_grad()
            torch.stack(each).sum().backward()
            optimizer.step()
            schedule.step()
        print("last losses, nats per token by head:", ", ".join(f"{loss.item():.2f}" for loss in each))
    return heads


def measured(directory: Path, batch: int, rounds: int) -> Iterator[Row]:
    """Yields speed over none and the share of verified drafts that stood, on answers to other passages."""
    plain, drafting, name = Demo(batch), Demo(batch), f"medusa:{directory}"
    for kind, sampling in SAMPLINGS.items():
        ways: dict[str, Drafter] = {"medusa": drafting.drafter(name)}
        for depth in range(1, HEADS + 1):
            [heads] = drafting.drafter(name)._speculators
            assert isinstance(heads, BatchSpeculator)
            ways[f"{depth} in each step"] = Always(heads, depth)
        for way, drafter in ways.items():
            ratios = []
            for at in range(2 * rounds):
                prompts = passages(drafting, batch, at, trained_on=False)
                before, drafted, after = (
                    demo.run(prompts, sampling, one)
                    for demo, one in ((plain, None), (drafting, drafter), (plain, None))
                )
                ratios.append(2 * drafted.rate / (before.rate + after.rate))
            low, high = interval(ratios[rounds:])
            yield Row(f"batch {batch}, {kind}, {way}", median(ratios[rounds:]), "x of none", low=low, high=high)
            tally = drafter.tally
            share = tally.accepted / tally.verified if tally.verified else 0.0
            yield Row(f"batch {batch}, {kind}, {way}: accepted of {tally.verified} verified", share, "")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--answers", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not (args.directory / FILE).exists():
        demo = Demo(AT_ONCE)
        inside = internals_of(demo.runner)
        assert inside is not None
        out = torch.from_numpy(inside.embeddings(range(demo.runner.spec.vocab_size)))  # the head's, which are tied
        train(out, *examples(demo, written(demo, args.answers)), args.epochs).save(args.directory)
    rows = list[Row]()
    for batch in map(int, args.batches.split(",")) if args.rounds else ():
        rows += (found := list(measured(args.directory, batch, args.rounds)))
        Console(width=150).print(table(found))
    if args.json:
        args.json.write_text(to_json(rows) + "\n")


if __name__ == "__main__":
    main()
