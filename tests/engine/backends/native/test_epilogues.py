"""Norms and gates within products: the bits of single ops in a whole step, and who else reads what they share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from baton.bench.engine.models import SIZES, random_runner
from baton.engine.backends.native.epilogues import mark_gates, mark_norms
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program.ops import Adapt, Add, Linear, Op, RmsNorm, SwiGlu
from baton.kernels.abi import native
from baton.kernels.step import structs
from baton.protos.nouns import Sampling
from tests.thorough import first_now

TINY = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 500}  # fmt: skip
GREEDY = Sampling(temperature=0.0, max_tokens=4)


def ran(runner: NativeRunner, rows: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Returns the chosen tokens, the bytes of the pages, and what the register of products holds after the step."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 500, (rows,)).tolist()
    memory = bytearray(20 * runner.spec.layout.page_bytes)
    runner.bind(memoryview(memory), 20)
    spec = SampleSpec(GREEDY, 0, rows, tokens, 1)
    plan = StepPlan((SequenceStep(0, tokens, 0, list(range(20)), spec, True),))
    runner.run(plan)  # makes the registers
    with torch.inference_mode():
        runner._arena.fill_(torch.nan)
    found = runner.run(plan)
    name = next(op.gate_up for op in runner._program.ops if isinstance(op, SwiGlu))
    between = runner._program.register(runner._arena, rows, name)
    return [each.token_id for each in found.sampled], torch.frombuffer(memory, dtype=torch.uint8), between


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("scheme", first_now(["int8", "bf16", "int4"], 2))
def test_a_gate_in_the_epilogue_changes_no_bit_of_a_step(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", TINY)
    runner, _ = random_runner("tiny", scheme, "bf16")
    tokens, pages, between = ran(runner, 150)
    assert bool(between.isnan().all()), "the product was written"
    for op in runner._program._array:
        if op.kind in (structs.RMS_NORM, structs.LINEAR, structs.SWIGLU):
            op.window = 0
    others, as_pages, between = ran(runner, 150)
    assert not bool(between.isnan().any())
    assert (tokens, bool(torch.equal(pages, as_pages))) == (others, True)


LAYER = (Linear("x", "wide", None, "both"), SwiGlu("both", "act"), Linear("act", "narrow", None, "delta"))


@pytest.mark.parametrize(
    ("ops", "marks"),
    [
        (LAYER, (1, 1, 0)),
        ((*LAYER, *LAYER), (1, 1, 0, 1, 1, 0)),
        (LAYER[:2], (1, 0)),
        ((*LAYER, Add("x", "both")), (0, 1, 0, 0)),
        ((*LAYER, Add("x", "act")), (1, 0, 0, 0)),
        ((*LAYER, Adapt("x", "wide", "act")), (1, 0, 0, 0)),
        ((LAYER[0], Adapt("x", "wide", "both"), *LAYER[1:]), (0, 0, 0, 0)),
        ((*LAYER[:2], Linear("x", "narrow", None, "delta")), (1, 0, 0)),
        ((Linear("x", "wide", None, "other"), *LAYER[1:]), (0, 0, 0)),
    ],
)
def test_only_what_nobody_else_reads_is_marked(ops: Sequence[Op], marks: Sequence[int]) -> None:
    compiled = [structs.Op() for _ in ops]
    mark_gates(ops, compiled, {name: at for at, name in enumerate(("x", "both", "other", "act", "delta"))})
    assert [op.window for op in compiled] == list(marks)


NORM = RmsNorm("x", "delta", "scale", 1e-5, "normed")


@pytest.mark.parametrize(
    ("ops", "mark"),
    [
        ((NORM, Linear("normed", "wide", None, "both")), 1),
        ((NORM, Linear("normed", "wide", None, "both"), NORM, Linear("normed", "wide", None, "both")), 1),
        ((NORM, Linear("normed", "wide", None, "both"), Linear("normed", "other", None, "act")), 0),
        ((NORM, Linear("normed", "wide", None, "both"), Adapt("normed", "wide", "both")), 0),
        ((NORM, Linear("x", "wide", None, "both")), 0),
        ((RmsNorm("x", None, "scale", 1e-5, "x"), Linear("x", "wide", None, "both")), 0),
        ((NORM, Add("x", "delta"), Linear("normed", "wide", None, "both")), 0),
    ],
)
def test_only_norms_that_nobody_else_reads_are_marked(ops: Sequence[Op], mark: int) -> None:
    compiled = [structs.Op(kind=structs.RMS_NORM) for _ in ops]
    mark_norms(ops, compiled, {name: at for at, name in enumerate(("x", "both", "normed", "act", "delta"))})
    assert compiled[0].window == mark
