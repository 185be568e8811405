"""A decode worker's loop whose steps are planned while others run on the device: the kernels on the SIMT shim."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from baton.decode_worker.engine.async_loop import AsyncDecodeLoop
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.abilities import async_steps_of
from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.load import load_runner
from baton.engine.plan import Runner
from baton.engine.steps.parts import EngineParts
from baton.engine.wide_pages import widened
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling
from baton.worker.engine_main import make_loop
from baton.worker.spec import EngineSpec, StepSpec
from tests.engine.backends.cuda.test_drafts import PAGES, Tape, joined
from tests.engine.backends.cuda.test_runner import PROMPTS, config, model, on_shim, pytestmark
from tests.thorough import first_now

__all__ = ["model", "on_shim", "pytestmark"]

KINDS = (
    Sampling(temperature=0.0, max_tokens=9, ignore_eos=True),
    Sampling(temperature=0.8, seed=3, max_tokens=7, ignore_eos=True, top_k=20, min_tokens=3),
    Sampling(temperature=0.8, seed=4, max_tokens=12, stop_token_ids=tuple(range(0, 200, 7))),
    Sampling(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1, repetition_penalty=1.3),
)


def answers(loop: DecodeLoop, tape: Tape) -> dict[int, Any]:
    """Returns tokens and log-probabilities of answers that come one by one, the third cancelled on its way."""
    for key, sampling in enumerate(KINDS, 1):
        prompt = PROMPTS[key % 2] + [key]
        loop.take(ch.Admit(key, EngineRequest(f"r{key}", tuple(prompt), len(prompt), sampling), True, 0.0))
        if key != 3:
            loop.turn([])
    while not loop.empty:
        loop.turn([])
    loop.pool.check()
    assert loop.snapshot().at_baseline
    return {key: joined([output.run for output in outputs]) for key, outputs in tape.outputs.items()}


def parts_of(runner: Runner, pages: int) -> tuple[EngineParts, Tape]:
    runner.bind(memoryview(bytearray(pages * runner.spec.layout.page_bytes)), pages)
    tape = Tape()
    return EngineParts.around(runner, PagePool(pages, runner.spec.layout.block_tokens), tape, time.monotonic), tape


@pytest.mark.parametrize(
    ("fields", "block_tokens"), first_now([({}, 16), ({"cuda_step": "mega"}, 16), ({}, 32)]), ids=str
)
def test_answers_are_those_of_steps_one_after_another(
    model: Path, on_shim: None, tmp_path: Path, fields: dict[str, str], block_tokens: int
) -> None:
    found = load_runner(config(model, device="cuda", cache_dir=str(tmp_path), **fields))
    assert isinstance(found, CudaRunner)
    runner, limits = widened(found, block_tokens), DecodeLimits(chunk_tokens=16)
    parts, tape = parts_of(runner, PAGES)
    want = answers(DecodeLoop(parts, limits, random.Random(0).randbytes), tape)
    parts, tape = parts_of(runner, PAGES)
    steps = async_steps_of(runner)
    assert steps is not None
    loop = AsyncDecodeLoop(parts, limits, random.Random(0).randbytes, steps)
    assert answers(loop, tape) == want
    assert loop.extras()["steps_ahead"] > 5
    found.close()


def test_a_gpus_decode_worker_plans_ahead_unless_it_is_told_not_to(
    model: Path, on_shim: None, tmp_path: Path
) -> None:
    found = load_runner(config(model, device="cuda", cache_dir=str(tmp_path)))
    parts, _ = parts_of(found, PAGES)
    engine = EngineSpec(model=str(model), device="cuda")
    kinds = [
        type(make_loop("decode", spec, engine, parts))
        for spec in (StepSpec(), StepSpec(async_steps="off"), StepSpec(speculation="prompt_lookup"))
    ]
    assert kinds == [AsyncDecodeLoop, DecodeLoop, DecodeLoop]
    found.close()  # type: ignore[attr-defined]


def test_a_cpus_does_not(model: Path) -> None:
    runner = load_runner(config(model))
    assert async_steps_of(runner) is None
    assert async_steps_of(widened(runner, 32)) is None
    parts, _ = parts_of(runner, PAGES)
    assert type(make_loop("decode", StepSpec(), EngineSpec(model=str(model)), parts)) is DecodeLoop
