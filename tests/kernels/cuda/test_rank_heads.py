"""A session that is one of several ranks (step/card_rank.h) on the SIMT shim: the host's pages have more heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.backends.ranks.cards.card import Card
from baton.engine.backends.ranks.cards.load import LoadedCard
from baton.engine.backends.ranks.cards.program import CardProgram
from baton.engine.backends.ranks.cards.runner import CardRanksRunner
from baton.engine.plan import Runner, SequenceStep, StepPlan
from baton.engine.program.rank_program import Rank, RankProgram
from baton.kernels.abi import native
from baton.kernels.collective.cards import Rooms
from baton.kernels.cuda.library import CudaLibrary
from baton.kernels.paged_attention.stored import read_layer
from baton.protos.nouns import LayerGroup
from tests.kernels.cuda import steps
from tests.kernels.cuda.test_layer_streams import two_layers
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

PAGES, HEADS, OWN, DIM = 24, 5, (2, 4), 32
EMPTY = 0x3C  # of bytes that nobody wrote


class Nobody:
    """Stands in for the followers of a rank that is alone."""

    def share(self, fd: int, size: int) -> None: ...

    def link(self, plan: object) -> None: ...


def both(on: CudaLibrary, dtype: str) -> tuple[CudaRunner, CardRanksRunner]:
    """A card that has two KV heads as all there are, and a rank that has them among five."""
    program = two_layers()
    spec, weights = trials.spec_of(program, dtype), trials.random_weights(program, torch.bfloat16, 3)
    plain = CudaRunner(spec, program, weights, on)
    group = LayerGroup("full", ("k", "v"), 2, HEADS, DIM)
    wide = msgspec.structs.replace(program, kv_heads=HEADS, groups=(group,))
    own = msgspec.structs.replace(RankProgram.undivided(wide, Rank()), own_kv=OWN)
    of_rank = trials.spec_of(wide, dtype)
    card = Card(CardProgram(own, weights, on), of_rank.layout, Rooms(on, 1024), on)
    loaded = LoadedCard(wide, own, weights, "", card)
    rank = CardRanksRunner(of_rank, loaded, Nobody(), (), 60.0)  # type: ignore[arg-type]
    for runner in (plain, rank):
        runner.bind(memoryview(bytearray([EMPTY]) * (PAGES * runner.spec.layout.page_bytes)), PAGES)
    return plain, rank


def heads_of(runner: Runner, memory: Tensor, heads: int, layer: int, dtype: str) -> tuple[Tensor, Tensor]:
    pages = memory.view(PAGES, -1)
    return read_layer(pages, torch.arange(PAGES), layer, 2, heads, DIM, dtype)


def plans(rows: int) -> Iterator[StepPlan]:
    """Two prompts of which one goes on, then the other one's pages by a sequence that the card hasn't seen."""
    rng = np.random.default_rng(6)
    tokens, table = rng.integers(0, 300, rows + 40).tolist(), rng.permutation(PAGES).tolist()
    first, second = table[: -(-(rows + 2) // 16)], table[-3:]

    def item(seq: int, begin: int, end: int, pages: list[int]) -> SequenceStep:
        return SequenceStep(seq, tokens[begin:end], begin, pages, targets=tokens[begin + 1 : end + 1], pool=True)

    yield StepPlan((item(1, 0, rows, first), item(2, 0, 19, second)))
    yield StepPlan((item(1, rows, rows + 1, first),))
    yield StepPlan((item(3, 19, 30, second),))


def require_same(on: CudaLibrary, dtype: str, rows: int) -> None:
    """The rank has the plain card's bits; in its heads of the host's pages too; others' stay empty."""
    plain, rank = both(on, dtype)
    hosts = plain._memory, torch.frombuffer(rank._buffer, dtype=torch.uint8)  # type: ignore[arg-type]
    before = hosts[1].clone()
    for plan in plans(rows):
        want, have = plain.run(plan), rank.run(plan)
        assert have.scored == want.scored
        for seq, pooled in want.pooled.items():
            assert (have.pooled[seq].last == pooled.last).all()
    assert rank.counts()["admitted"] == 2
    for layer in (0, 1):
        narrow = heads_of(plain, hosts[0], 2, layer, dtype)
        wide, empty = (heads_of(rank, memory, HEADS, layer, dtype) for memory in (hosts[1], before))
        for mine, all_, nothing in zip(narrow, wide, empty, strict=True):
            assert torch.equal(all_[:, OWN[0] : OWN[1]], mine)
            others = [head for head in range(HEADS) if not OWN[0] <= head < OWN[1]]
            assert torch.equal(all_[:, others], nothing[:, others])
    plain.close()
    rank._card.close()


CASES: list[tuple[str, int]] = [("fp8_e4m3", 17), ("int8", 40), ("bfloat16", 40), ("bfloat16", 270)]


@pytest.mark.parametrize(("dtype", "rows"), first_now(CASES, 1))
def test_a_rank_reads_and_writes_its_own_heads_of_the_hosts_pages(dtype: str, rows: int) -> None:
    require_same(steps.simt(), dtype, rows)


@pytest.mark.parametrize("bug", first_now(["HEAD_SCALES", "FIRST_HEAD"], 0))
def test_a_planted_bug_is_caught(bug: str) -> None:
    planted: Any = steps.simt((f"-DBATON_MUTATION_CUDA_STEP_{bug}",))
    with pytest.raises(AssertionError):
        require_same(planted, "int8", 40)
