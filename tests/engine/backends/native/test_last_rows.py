"""Tests that the last ops of a step are run for the rows alone whose results are read, with the same bits."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from baton.engine.backends.native.runner import NativeRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.ops import PagedAttention
from baton.kernels.abi import native
from baton.kernels.step.structs import Step
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make, prompts
from tests.conformance.drive import Driver
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

GREEDY = Sampling(temperature=0.0, max_tokens=9, logprobs=2)
KINDS = ("gemma3n", "gemma3", "deepseek_v3", "jamba", "qwen3_next", "gpt_oss", "cohere2", "phimoe")

FORMS = {"": {}, "bf16": {"dtype": "bfloat16"}, "int8 KV": {"kv_cache_dtype": "int8"}}


def loaded(folder: Path, kind: str, **settings: str) -> NativeRunner:
    found = load_runner(EngineConfig(str(make(folder / kind, kind)), threads=1, **settings))  # type: ignore[arg-type]
    assert isinstance(found, NativeRunner)
    return found


@pytest.mark.parametrize("kind", [*first_now(KINDS, 3), "gemma3n in bf16", "jamba in bf16", "gemma3n in int8 KV"])
def test_answers_and_likelihoods_have_the_bits_that_they_have_if_all_rows_are_computed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, form = kind.partition(" in ")
    runner, found = loaded(tmp_path, name, **FORMS[form]), []
    asked = [prompt[:150] for prompt in prompts(runner.spec.vocab_size, 6)[1:]]
    for _ in range(2):
        driver = Driver(runner, pages=200, chunk=61)
        found.append((driver.answer(asked, GREEDY), driver.logprobs))
        monkeypatch.setattr(NativeRunner, "_spares", lambda *_: False)
    assert found[0] == found[1]


class Spy:
    """Runs the native step, and notes how many rows each call has, by its first op."""

    def __init__(self, runner: NativeRunner) -> None:
        self._run, self.rows = runner._run, dict[int, int]()
        runner._run = self

    def __call__(self, program: int, step: Any, begin: int, end: int) -> object:
        told = ctypes.cast(step, ctypes.POINTER(Step)).contents
        self.rows |= dict.fromkeys(range(begin, end), told.rows)
        return self._run(program, step, begin, end)


def item(seq: int, tokens: int, start: int = 0, sample: bool = True, targets: int = 0) -> SequenceStep:
    spec = SampleSpec(GREEDY, 0, start + tokens, [5] * (start + tokens), 1) if sample else None
    pages = range(seq * 8, seq * 8 + 8)
    return SequenceStep(seq, [5] * tokens, start, pages, spec, tokens > 1, targets=[5] * targets)


def test_layers_that_read_others_k_and_v_compute_the_rows_alone_that_are_read(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "gemma3n")
    spy, first = Spy(runner), len(runner._program.program.divided[0])
    late = [at for at, op in enumerate(runner._program.ops) if isinstance(op, PagedAttention) and at >= first]
    assert len(late) == 4, "those of the three layers that share, and of the last one with K and V"
    runner.bind(memoryview(bytearray(40 * runner.spec.layout.page_bytes)), 40)
    for step, rows in (
        ((item(0, 50),), 1),
        ((item(0, 50), item(1, 1, start=20)), 2),
        ((item(0, 50, targets=7), item(1, 1, start=20)), 9),
        ((item(0, 50, sample=False), item(1, 1, start=20)), 1),
    ):
        runner.run(StepPlan(step))
        everything = sum(len(each.tokens) for each in step)
        assert [spy.rows[at] for at in (0, first - 1, *late)] == [everything, everything, *[rows] * 4]
    spy.rows.clear()
    runner.run(StepPlan((item(0, 50, sample=False),)))
    assert sorted(spy.rows) == list(range(first)), "of a chunk before the last nobody reads a row"
