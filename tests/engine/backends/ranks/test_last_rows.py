"""Tests that ranks run the last ops of a step for the rows alone that are read, with the bits of one rank."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import SampleSpec, SequenceStep, StepPlan
from baton.engine.program import ops as p
from baton.engine.program.shares import Widths
from baton.kernels.abi import native
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import make
from tests.conformance.kinds import KINDS
from tests.conformance.small_kinds import SMALL
from tests.engine.backends.ranks.same_bits import same_bits
from tests.engine.backends.ranks.test_identity import takes
from tests.engine.backends.ranks.threads import SharedDriver, on_ranks
from tests.engine.test_models import program
from tests.thorough import first_now

GREEDY = Sampling(temperature=0.0, max_tokens=9)
TYPES = sorted({str(kind["model_type"]) for kind in (KINDS | SMALL).values()})
SHARES = [
    ("mixtral", "ep", 2), ("gemma3n", "tp", 2), ("qwen3_moe", "tp2+pp2", 4), ("deepseek_v3", "tp", 2),
    ("mixtral", "tp", 2), ("gemma3n", "pp", 3), ("qwen3_moe", "ep", 3), ("gpt_oss", "tp2+pp2", 4),
]  # fmt: skip


def of_rows(runner: object, items: tuple[SequenceStep, ...]) -> int:
    """Runs a step of ``items``; returns the rows that experts of all layers computed in it."""
    before = sum(runner.expert_rows().by_expert)  # type: ignore[attr-defined]
    runner.run(StepPlan(items))  # type: ignore[attr-defined]
    return sum(runner.expert_rows().by_expert) - before  # type: ignore[attr-defined]


def item(seq: int, tokens: int, start: int = 0, sample: bool = True, targets: int = 0) -> SequenceStep:
    spec = SampleSpec(GREEDY, 0, start + tokens, [5] * (start + tokens), 1) if sample else None
    pages = range(seq * 8, seq * 8 + 8)
    return SequenceStep(seq, [5] * tokens, start, pages, spec, tokens > 1, targets=[5] * targets)


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize("widths", [{"ep": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_the_last_layers_experts_compute_the_rows_alone_that_are_read(
    tmp_path: Path, widths: dict[str, int]
) -> None:
    model = str(make(tmp_path, "mixtral"))
    spec = load_runner(EngineConfig(model, threads=1)).spec
    runner = on_ranks(spec, EngineConfig(model, threads=1, rank_bound_s=60.0, **widths))  # type: ignore[arg-type]
    try:
        SharedDriver(runner, 40)
        for step, rows in (
            ((item(0, 50),), 1),
            ((item(0, 50), item(1, 1, start=20)), 2),
            ((item(0, 70), item(1, 1, start=20), item(2, 70)), 3),
            ((item(0, 50, targets=7), item(1, 1, start=20)), 9),
            ((item(0, 50, sample=False), item(1, 1, start=20)), 1),
            ((item(0, 50, sample=False),), 0),
        ):
            everything = sum(len(each.tokens) for each in step)
            assert of_rows(runner, step) == (everything + rows) * 2  # chosen experts of each
    finally:
        runner.leave()


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
@pytest.mark.parametrize(("kind", "share", "count"), first_now(SHARES, 2), ids=str)
def test_ranks_of_several_hosts_leave_out_rows_with_the_bits_of_one(
    tmp_path: Path, kind: str, share: str, count: int
) -> None:
    same_bits(make(tmp_path, kind), count, share, chunk=61, hosts=2)


@pytest.mark.parametrize("widths", [Widths(tp=2), Widths(cp=2), Widths(pp=2), Widths(tp=2, pp=2)], ids=str)
def test_the_rank_that_leads_to_the_head_leaves_out_rows_in_every_architecture(widths: Widths) -> None:
    for kind in TYPES:
        if not takes(widths, whole := program(kind)):
            continue
        shares = [widths.share(whole, index) for index in range(widths.count)]
        found = [share.last_ops for share in shares]
        last = [share.program.ops[of.begin :] for share, of in zip(shares, found, strict=True) if of]
        assert len(last) == (widths.tp if widths.pp > 1 else widths.count), (
            f"{kind}: stages before the last one read all"
        )
        kinds = {tuple(type(op) for op in ops if not isinstance(op, p.NormPart)) for ops in last}
        assert len(kinds) == 1, f"{kind}: ranks meet as often"
        assert p.Linear in kinds.pop()


def test_ranks_that_would_write_what_others_still_read_run_all_rows() -> None:
    own = Widths(tp=2).share(program("deepseek_v3"), 0)
    found = own.last_ops
    assert found is not None
    assert len(found.shared) == 1, "all heads' attention, which ranks have filled together"
    (name,) = found.shared
    again = p.RmsNorm("x", None, "norm", 1e-5, name)
    ops = (*own.program.ops[:-1], again, own.program.ops[-1])
    wrong = msgspec.structs.replace(own, program=msgspec.structs.replace(own.program, ops=ops))
    assert wrong.last_ops is None
