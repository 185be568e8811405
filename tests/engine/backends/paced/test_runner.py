"""The paced engine against its oracle, and against wrong pages."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from baton.cost.curves import adapter_seconds, step_seconds
from baton.cost.fit import LEAST_OF_EACH, AdaptedStepFit
from baton.cost.profiles import load_profile
from baton.engine.adapters.reading import read_here
from baton.engine.adapters.tensors import FILE
from baton.engine.backends.paced.adapters import PacedAdapters
from baton.engine.backends.paced.runner import PacedRunner, paced_answer
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.protos.channel import AdapterPlace
from baton.protos.errors import AdapterNotLoaded, BatonError, ConfigError, InvalidRequest
from baton.protos.measurements import AdapterCurve, AdapterRowCounts, StepSample
from baton.protos.nouns import Sampling
from tests.conformance.drive import Driver

VOCAB, ROW = 5000, 32
SHAPE = {"kv_bytes_per_token": ROW, "vocab_size": VOCAB, "max_model_len": 4096}


def paced(**changes: object) -> PacedRunner:
    return PacedRunner("test", step_seconds=lambda shape: 0.0, **(SHAPE | changes))  # type: ignore[arg-type]


def some_prompts(count: int = 9) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 15, 16, 17, 200]))] for _ in range(count)]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0, max_tokens=50), Sampling(seed=9, max_tokens=50)])
def test_answers_are_the_oracles_whatever_the_chunks(sampling: Sampling) -> None:
    asked = some_prompts()
    for chunk in (1, 7, 16, 500):
        found = Driver(paced(), pages=200, chunk=chunk, seed=chunk).answer(asked, sampling, choice=2)
        assert found == [paced_answer(prompt, sampling, 2, **SHAPE) for prompt in asked]


def test_stops_and_min_tokens_are_the_oracles() -> None:
    vocab = {"vocab_size": 11, "eos_token_ids": (4, 5)}
    asked = [[1, 2, 3], [7], [10] * 20]
    for sampling in (
        Sampling(seed=1, max_tokens=90),
        Sampling(seed=1, max_tokens=90, min_tokens=30),
        Sampling(seed=1, max_tokens=30, ignore_eos=True),
    ):
        found = Driver(paced(**vocab), pages=60).answer(asked, sampling)
        assert found == [paced_answer(prompt, sampling, **(SHAPE | vocab)) for prompt in asked]
        assert all(len(answer) > sampling.min_tokens for answer in found if len(answer) < sampling.max_tokens)


def test_an_answer_is_its_adapters_and_one_that_is_not_held_is_named(tmp_path: Path) -> None:
    runner = paced(adapters=PacedAdapters(64, 1 << 20))
    names = [held(runner, tmp_path / name, name, seed) for name, seed in (("sql", 1), ("sql", 2), ("style", 1))]
    asked, sampling = [list(range(40))] * 4, Sampling(temperature=0.0, max_tokens=9)
    found = Driver(runner, pages=60).answer(asked, sampling, adapters=[*names, ""])
    assert found == [paced_answer(asked[0], sampling, adapter=name, **SHAPE) for name in (*names, "")]
    assert len({tuple(answer) for answer in found}) == 4
    with pytest.raises(AdapterNotLoaded, match="gone@"):
        runner.run(StepPlan((SequenceStep(1, [1], 0, [0], adapter="gone@0123456789abcdef"),)))


def held(runner: PacedRunner, directory: Path, name: str, seed: int) -> str:
    """The id of an adapter that the runner holds: two matrices of a module that no model here has."""
    directory.mkdir(exist_ok=True)
    random_matrix = np.random.default_rng(seed).random((4, 16), np.float32)
    halves = {"lora_A": random_matrix, "lora_B": random_matrix.T.copy()}
    save_file({f"base_model.model.any.{k}.weight": v for k, v in halves.items()}, directory / FILE)
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    assert runner.adapters is not None
    found = read_here(AdapterPlace(name, str(directory)), runner.adapters.base)
    runner.adapters.hold(found.info.id, found.packed)
    return found.info.id


def test_seed_and_choice_change_a_drawn_answer_but_not_a_greedy_one() -> None:
    def answer(temperature: float, seed: int, choice: int) -> list[int]:
        return paced_answer([1, 2], Sampling(temperature=temperature, seed=seed), choice, **SHAPE)

    assert answer(0.0, 1, 0) == answer(0.0, 2, 1)
    assert len({tuple(answer(1.0, seed, choice)) for seed in (1, 2) for choice in (0, 1)}) == 4


@pytest.mark.parametrize("order", ["ascending", "descending", "mixed"])
def test_the_order_of_its_pages_changes_nothing(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "baton.engine.backends.paced.runner.PART_BYTES", 3 * 16 * ROW
    )  # several parts, the last one short
    pages = {"ascending": range(2, 10), "descending": range(9, 1, -1), "mixed": [3, 4, 9, 8, 2, 5, 6, 7]}[order]
    prompt, sampling = list(range(120)), Sampling(temperature=0.0, max_tokens=1)
    runner = paced()
    runner.bind(memoryview(bytearray(10 * runner.spec.layout.page_bytes)), 10)
    spec = SampleSpec(sampling, 0, 120, prompt, 120)
    found = runner.run(StepPlan((SequenceStep(0, prompt, 0, list(pages), spec),))).sampled[0].token_id
    assert [found] == paced_answer(prompt, sampling, **SHAPE)


def test_a_foreign_page_among_those_read_fails() -> None:
    runner = paced()
    runner.bind(memoryview(bytearray(4 * runner.spec.layout.page_bytes)), 4)
    spec = SampleSpec(Sampling(temperature=0.0), 0, 33, [1] * 33, 33)
    for foreign in (-1, 4):
        with pytest.raises(IndexError, match="outside"):
            runner.run(StepPlan((SequenceStep(0, [1], 32, [foreign, 0, 1], spec),)))


@pytest.mark.parametrize("token", [0, 15, 16, 33])
def test_one_wrong_byte_anywhere_gives_another_token(token: int) -> None:
    runner = paced()
    buffer = bytearray(10 * runner.spec.layout.page_bytes)
    runner.bind(memoryview(buffer), 10)
    pages, prompt = [7, 2, 5], list(range(34))
    runner.run(StepPlan((SequenceStep(0, prompt, 0, pages),)))
    spec = SampleSpec(Sampling(temperature=0.0), 0, 35, [*prompt, 9], 34)
    step = StepPlan((SequenceStep(0, [9], 34, pages, spec),))
    right = runner.run(step).sampled[0].token_id
    assert runner.run(step).sampled[0].token_id == right
    buffer[pages[token // 16] * runner.spec.layout.page_bytes + token % 16 * ROW + 5] ^= 1
    assert runner.run(step).sampled[0].token_id != right


def test_a_step_takes_as_long_as_the_curve_says() -> None:
    now, shapes = [0.0], list[StepSample]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def curve(shape: StepSample) -> float:
        shapes.append(shape)
        return 0.25

    runner = PacedRunner("t", step_seconds=curve, sleep=sleep, clock=lambda: now[0], **SHAPE)
    runner.bind(memoryview(bytearray(4 * runner.spec.layout.page_bytes)), 4)
    step = SequenceStep(0, [1, 2, 3], 0, [1], is_prefill=True)
    assert runner.run(StepPlan((step,))).seconds == 0.25
    assert (shapes[0].prefill_tokens, shapes[0].decode_sequences) == (3, 0)


def test_a_step_is_timed_by_its_rows_on_adapters_too(tmp_path: Path) -> None:
    shapes = list[StepSample]()

    def curve(shape: StepSample) -> float:
        shapes.append(shape)
        return 0.0

    runner = PacedRunner("t", step_seconds=curve, adapters=PacedAdapters(64, 1 << 20), **SHAPE)
    one, two = (held(runner, tmp_path / name, name, seed) for seed, name in enumerate(("one", "two")))
    runner.bind(memoryview(bytearray(8 * runner.spec.layout.page_bytes)), 8)
    asked = (("", [1]), (one, [1, 2, 3]), (one, [1]), (two, [1]))
    items = [SequenceStep(i, tokens, 0, [i], adapter=adapter) for i, (adapter, tokens) in enumerate(asked)]
    runner.run(StepPlan(tuple(items)))
    runner.run(StepPlan(tuple(items[:1])))
    assert [shape.adapted for shape in shapes] == [AdapterRowCounts(5, 20, 2, 8), None]


def test_what_adapters_add_to_a_paced_engines_steps_is_found_in_them(tmp_path: Path) -> None:
    now = [0.0]
    curve, added = load_profile("laptop").step, AdapterCurve(5e-5, 2e-4, 8.0)
    runner = PacedRunner(
        "t",
        step_seconds=lambda shape: step_seconds(curve, shape) + adapter_seconds(added, shape.adapted),
        adapters=(table := PacedAdapters(64, 1 << 20)),
        clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
        **SHAPE,
    )
    names = ("", held(runner, tmp_path / "one", "one", 0), held(runner, tmp_path / "two", "two", 1))
    runner.bind(memoryview(bytearray(8 * runner.spec.layout.page_bytes)), 8)
    fit = AdaptedStepFit()
    for at in range(16 * LEAST_OF_EACH):
        on = [names[(at + i) % 3 if at % 2 else 0] for i in range(1 + at % 6)]
        items = [SequenceStep(i, [1], 0, [i], adapter=adapter) for i, adapter in enumerate(on)]
        plan, began = StepPlan(tuple(items)), now[0]
        runner.run(plan)
        fit.observe(plan.shape(now[0] - began, table.rank_of))
    found = fit.adapters
    assert found is not None
    assert (found.row, found.adapter) == (pytest.approx(5e-5, rel=0.1), pytest.approx(2e-4, rel=0.1))
    assert found.rank == pytest.approx(4)


def test_logprobs_have_the_asked_shape() -> None:
    driver = Driver(paced(), pages=4)
    answer = driver.answer([[1]], Sampling(max_tokens=3, logprobs=2))[0]
    assert [(found.chosen.token_id, len(found.top)) for found in driver.logprobs[0]] == [(t, 2) for t in answer]


def test_what_cannot_be_computed_is_refused_by_name() -> None:
    runner = paced()
    runner.bind(memoryview(bytearray(4 * runner.spec.layout.page_bytes)), 4)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        runner.run(StepPlan((SequenceStep(0, [VOCAB], 0, [1]),)))
    with pytest.raises(BatonError, match="too few"):
        runner.run(StepPlan((SequenceStep(0, [1] * 17, 0, [1]),)))
    with pytest.raises(BatonError, match="outside"):
        runner.run(StepPlan((SequenceStep(0, [1], 0, [4]),)))
    with pytest.raises(ConfigError, match="multiple of 16"):
        paced(kv_bytes_per_token=20)


def test_it_loads_without_torch() -> None:
    code = "import sys, baton.engine.backends.paced.runner, baton.engine.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
