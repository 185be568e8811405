"""Drafts that are verified by the CUDA step, on the SIMT shim: few rows give the tokens of no drafts.

A step of over 64 rows may round otherwise, for which reason ``auto`` drafts nothing on a GPU; what is named does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.abilities import branches_of
from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.load import load_runner
from baton.engine.plan import StepPlan, StepResult
from baton.engine.speculate.drafter import Drafter
from baton.engine.steps.parts import EngineParts
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling, TokenRun
from tests.engine.backends.cuda.test_runner import ONE_LAYER, PROMPTS, config, model, on_shim, pytestmark
from tests.engine.speculate.oracle import Bushy, Eager, Oracle
from tests.thorough import first_now, later

__all__ = ["model", "on_shim", "pytestmark"]

PAGES = 24
KINDS = (
    Sampling(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2),
    Sampling(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, repetition_penalty=1.2),
)


class Counted:
    """Is a runner that counts its steps by number of rows, and those that verify drafts."""

    def __init__(self, runner: CudaRunner) -> None:
        self.spec, self.work, self.bind, self._runner = runner.spec, runner.work, runner.bind, runner
        self.verified = self.most = self.branched = 0
        self.branches = runner.branches

    def run(self, plan: StepPlan) -> StepResult:
        self.verified += sum(len(item.verify) for item in plan.items)
        self.branched += sum(bool(item.draft_branches) for item in plan.items)
        if all(len(item.tokens) == 1 + len(item.verify) for item in plan.items):
            self.most = max(self.most, sum(len(item.tokens) for item in plan.items))
        return self._runner.run(plan)


class Tape:
    """Keeps what the loop tells."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[ch.Output]] = {}

    def send(self, message: Any) -> None:
        for output in message.outputs if isinstance(message, ch.Tokens) else ():
            self.outputs.setdefault(output.key, []).append(output)

    def poll(self, timeout_s: float) -> list[Any]:
        return []


def answers(runner: Counted, drafter: Drafter | None) -> dict[int, tuple[Any, ...]]:
    """Returns tokens and log-probabilities of each answer."""
    runner.bind(memoryview(bytearray(PAGES * runner.spec.layout.page_bytes)), PAGES)
    tape = Tape()
    parts = EngineParts.around(runner, PagePool(PAGES), tape, time.monotonic)
    loop = DecodeLoop(parts, DecodeLimits(chunk_tokens=16), random.Random(0).randbytes, drafter)
    for key, (prompt, sampling) in enumerate(zip(PROMPTS, KINDS, strict=True), 1):
        loop.take(ch.Admit(key, EngineRequest(f"r{key}", tuple(prompt), len(prompt), sampling), True, 0.0))
    while not loop.empty:
        loop.turn([])
    return {key: joined([output.run for output in outputs]) for key, outputs in tape.outputs.items()}


def joined(runs: Sequence[TokenRun]) -> tuple[Any, ...]:
    """Returns the tokens of ``runs`` and their log-probabilities."""
    return tuple(token for run in runs for token in run.token_ids), tuple(
        one for run in runs for one in run.logprobs
    )


# Ways to run a step, and whether drafts are trees, chains among them.
WAYS = first_now([({"cuda_step": "graph"}, True), *(({"cuda_step": step}, False) for step in ("graph", "mega"))])
WAYS = [*WAYS, later({"cuda_step": "mega"}, True)]


@pytest.mark.parametrize(("fields", "trees"), WAYS, ids=str)
def test_drafts_that_are_asked_for_by_name_change_no_token(
    model: Path, on_shim: None, tmp_path: Path, fields: dict[str, str], trees: bool
) -> None:
    found = load_runner(config(model, device="cuda", cache_dir=str(tmp_path), **fields))
    assert isinstance(found, CudaRunner)
    plain = answers(Counted(found), None)
    told = {f"r{key}": tokens for key, (tokens, _) in plain.items()}
    speculator = (Bushy if trees else Oracle)(told, 0.7, ONE_LAYER["vocab_size"])
    drafter, runner = Eager(speculator, most=2 if trees else 3, trees=trees), Counted(found)
    assert branches_of(runner)
    assert answers(runner, drafter) == plain
    assert (runner.branched > 0) == trees
    assert runner.verified > drafter.tally.accepted > 0
    assert 2 < runner.most <= 8
    found.close()
