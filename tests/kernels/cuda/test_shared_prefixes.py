"""Sequences of a step that begin with the same pages: the CUDA step reads those once (cascade attention)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.backends.cuda import load as cuda_load
from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.runner import BY_GRAPH, PLAIN, CudaRunner
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import Runner, SequenceStep, StepPlan, StepResult
from baton.kernels.abi import native
from baton.kernels.cuda.library import CudaLibrary
from baton.protos.errors import ConfigError
from tests.kernels.cuda import steps

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

PREFIX, LEAST = 48, 32  # tokens that a family of sequences begins with; from how many on they are shared
HEAD = (0, 1, 2)  # its pages


@pytest.fixture(scope="module")
def device() -> CudaLibrary:
    return steps.simt()


def runners(kv: str, on: CudaLibrary, how: int = PLAIN, least: int = LEAST) -> tuple[NativeRunner, CudaRunner]:
    program = trials.one_layer(steps.model())
    spec, weights = trials.spec_of(program, kv), trials.random_weights(program, torch.bfloat16, 3)
    both = NativeRunner(spec, program, weights), CudaRunner(spec, program, weights, on)
    for runner in both:
        runner.bind(memoryview(bytearray(trials.PAGES * spec.layout.page_bytes)), trials.PAGES)
    both[1].how = how
    both[1].share(least)
    return both


def plans(vocab: int) -> Iterator[StepPlan]:
    """The prefix, by one; then decodes of a family of four between two strangers, one of whom begins later."""
    rng = np.random.default_rng(4)
    prefix, own = rng.integers(0, vocab, PREFIX).tolist(), rng.integers(0, vocab, (6, 64)).tolist()
    pages = [*([*HEAD, 3 + i] for i in range(4)), [7, 8], [9, 10, 11, 12]]
    yield StepPlan((SequenceStep(0, prefix, 0, pages[0], pool=True),))
    yield StepPlan((SequenceStep(5, own[5][:PREFIX], 0, pages[5], pool=True),))
    for at in range(5):
        family = [SequenceStep(i, [own[i][at]], PREFIX + at, pages[i], pool=True) for i in range(4)]
        strangers = [
            SequenceStep(4, [own[4][at]], at, pages[4], pool=True),
            SequenceStep(5, [own[5][PREFIX + at]], PREFIX + at, pages[5], pool=True),
        ]
        yield StepPlan((strangers[0], *family[: 2 + at % 3], strangers[1]))


def answers(runner: Runner) -> list[StepResult]:
    return [runner.run(plan) for plan in plans(runner.spec.vocab_size)]


def apart(want: list[StepResult], have: list[StepResult]) -> float:
    """The worst distance of a last hidden state."""
    pairs = [(w.pooled[seq].last, h.pooled[seq].last) for w, h in zip(want, have, strict=True) for seq in w.pooled]
    return max(float(np.linalg.norm(h - w) / np.linalg.norm(w)) for w, h in pairs)


@pytest.mark.parametrize(("kv", "how"), [("bfloat16", BY_GRAPH), ("int8", PLAIN)])
def test_who_shares_a_prefix_answers_as_on_the_cpu(device: CudaLibrary, kv: str, how: int) -> None:
    cpu, gpu = runners(kv, device, how)
    assert apart(answers(cpu), answers(gpu)) < trials.STATES
    gpu.close()


def test_without_being_asked_each_reads_for_itself(device: CudaLibrary) -> None:
    found: list[Any] = []
    for least in (0, PREFIX + 16, LEAST):
        _, gpu = runners("bfloat16", device, least=least)
        found.append(np.stack([r.pooled[seq].last for r in answers(gpu) for seq in sorted(r.pooled)]))
        gpu.close()
    assert (found[0] == found[1]).all()  # too few tokens in common: the same bits
    assert (found[0] != found[2]).any()  # another order of sums
    assert np.allclose(found[0], found[2], atol=0.05)


def test_the_engine_shares_where_its_setting_says_so(device: CudaLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CUDA_SIMT", "1")
    program = trials.one_layer(steps.model())
    spec, weights = trials.spec_of(program, "bfloat16"), trials.random_weights(program, torch.bfloat16, 3)
    asked: list[int] = []
    monkeypatch.setattr(CudaRunner, "share", lambda _, least: asked.append(least))
    for text in ("", "512"):
        monkeypatch.setenv(cuda_load.SHARED_ENV, text)
        made = cuda_load.on_kernels(spec, program, weights, device)
        assert made is not None
        made.close()
    assert asked == [0, 512]
    monkeypatch.setenv(cuda_load.SHARED_ENV, "many")
    with pytest.raises(ConfigError, match=r"BATON_SHARED_PREFIXES.*'many'; give a number of tokens"):
        cuda_load.on_kernels(spec, program, weights, device)


@pytest.mark.thorough
def test_a_page_too_many_is_noticed() -> None:
    """The planted bug counts one page more than the sequences have in common as shared."""
    cpu, gpu = runners("bfloat16", steps.simt(("-DBATON_MUTATION_CUDA_STEP_GROUPS",)), least=16)
    shorter = list(plans(cpu.spec.vocab_size))[:2]
    for runner in (cpu, gpu):
        for plan in shorter:
            runner.run(plan)
    decode = StepPlan(
        tuple(
            SequenceStep(i, [7 + i], PREFIX, [0, 1, *pages], pool=True) for i, pages in enumerate(([2, 3], [9, 4]))
        )
    )
    assert apart([cpu.run(decode)], [gpu.run(decode)]) > trials.STATES
    gpu.close()
