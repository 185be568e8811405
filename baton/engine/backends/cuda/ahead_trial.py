"""Tests whether steps that are submitted before the step in front was looked at choose the tokens of steps that are
run one after another, on this machine.

Knows nothing of checkpoints. The same runner does both, so that its bits are the same and tokens can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.backends.cuda.trial import PAGES, PROMPTS
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan, StepResult
from baton.protos.errors import BatonError
from baton.protos.nouns import Sampling

STEPS = 6  # decodes of each sequence: plainly, captured, replayed
GREEDY, DRAWN = Sampling(temperature=0.0), Sampling(temperature=1.0, seed=7)


def ahead_off(runner: CudaRunner, seed: int = 1) -> str:
    """Returns what is wrong with the runner's asynchronous steps, in words; empty if nothing is, or it has none.

    Binds pages of its own, as `trial` does.
    """
    if runner.async_steps is None:
        return ""
    try:
        want, have = _one_by_one(runner, seed), _ahead(runner, seed)
    except BatonError as error:
        return error.message
    wrong = [number for number, pair in enumerate(zip(want, have, strict=True)) if pair[0] != pair[1]]
    return f"step {wrong[0]}, submitted ahead, chose other tokens" if wrong else ""


def _one_by_one(runner: CudaRunner, seed: int) -> list[list[int]]:
    _bind(runner)
    plans, found = _plans(seed), list[list[int]]()
    plan = next(plans)
    for behind in (*plans, None):
        found.append(_tokens(runner.run(plan)))
        if behind is not None:
            plan = _with_tokens(behind, found[-1])
    return found


def _ahead(runner: CudaRunner, seed: int) -> list[list[int]]:
    _bind(runner)
    assert runner.async_steps is not None
    steps, (first, *rest) = runner.async_steps, _plans(seed)
    steps.submit(first)
    found = []
    for plan in rest:
        steps.submit(plan, {item.seq for item in plan.items})
        found.append(_tokens(steps.collect()))
    return [*found, _tokens(steps.collect())]


def _plans(seed: int) -> Iterator[StepPlan]:
    """Yields prompts, then decodes whose tokens are yet to be known, in another order each time."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 300, count).tolist() for count in PROMPTS]
    tables = [table.tolist() for table in np.array_split(rng.permutation(PAGES), len(PROMPTS))]
    for step in range(STEPS + 1):
        items = []
        for seq, prompt in enumerate(prompts):
            end = len(prompt) + step
            spec = SampleSpec((GREEDY, DRAWN)[seq % 2], 0, end, (), len(prompt))
            tokens, start = (prompt, 0) if not step else ([0], end - 1)
            items.append(SequenceStep(seq, tokens, start, tables[seq], spec))
        turned = step % len(items)
        yield StepPlan((*items[turned:], *items[:turned]))


def _with_tokens(plan: StepPlan, tokens: list[int]) -> StepPlan:
    """Returns ``plan`` with the sequences' ``tokens``, in the order of their numbers."""
    items = [SequenceStep(i.seq, [tokens[i.seq]], i.start, i.pages, i.sample) for i in plan.items]
    return StepPlan(tuple(items))


def _tokens(result: StepResult) -> list[int]:
    return [one.token_id for one in sorted(result.sampled, key=lambda one: one.seq)]


def _bind(runner: CudaRunner) -> None:
    runner.bind(memoryview(bytearray(PAGES * runner.spec.layout.page_bytes)), PAGES)
