"""Steps whose KV stays on the card: the host's pages get a copy when somebody is about to read it, no sooner."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.demand_pages import DemandPages
from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.plan import SequenceStep, StepPlan
from baton.kernels.abi import native
from baton.kernels.cuda.library import CudaLibrary
from baton.kv.memory.host_pages import PageMemory
from tests.kernels.cuda.steps import DRAWN, model, simt, steps

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

EMPTY = 0xA5
LONG = 270  # rows of a chunk beyond those of a captured graph


class Rig:
    """A runner on the shim and its host's pages, which begin as EMPTY bytes."""

    def __init__(self, on: CudaLibrary, most: int | None, pages: int = trials.PAGES, kv: str = "int8") -> None:
        program = trials.one_layer(model())
        spec, weights = trials.spec_of(program, kv), trials.random_weights(program, (8, 0), 3)
        self.runner, self.pages = CudaRunner(spec, program, weights, on), pages
        if most is not None:
            assert self.runner.on_demand is not None
            self.runner.on_demand(most * spec.layout.page_bytes)
        self.memory = PageMemory.create(pages, spec.layout.page_bytes, sparse=True)
        self.host = np.frombuffer(self.memory.view(), np.uint8).reshape(pages, -1)
        self.host[:] = EMPTY
        self.runner.bind(self.memory.view(), pages)

    @property
    def mirror(self) -> DemandPages:
        assert isinstance(self.runner.mirror, DemandPages)
        return self.runner.mirror


@pytest.fixture(scope="module")
def device() -> CudaLibrary:
    return simt()


@pytest.fixture
def rigs(device: CudaLibrary) -> Iterator[list[Rig]]:
    """One whose host has every page, and one whose copies are made on demand."""
    made = [Rig(device, None), Rig(device, 0)]
    yield made
    for rig in made:
        rig.runner.close()


def test_tokens_and_states_have_the_bits_of_steps_that_write_back_and_the_host_is_not_touched(
    rigs: list[Rig],
) -> None:
    asked = steps(trials.VOCAB, [37, 20], DRAWN)
    for _ in range(4):
        plan = next(asked)
        want, have = (rig.runner.run(plan) for rig in rigs)
        assert [(s.seq, s.token_id) for s in have.sampled] == [(s.seq, s.token_id) for s in want.sampled]
        assert all(have.pooled[seq].last.tobytes() == want.pooled[seq].last.tobytes() for seq in (0, 1))
    whole, demand = rigs
    assert (demand.host == EMPTY).all()
    assert demand.runner.counts()["replayed"] == whole.runner.counts()["replayed"] == 2
    table = plan.items[0].pages
    demand.mirror.make_whole([table[1], table[0]])
    for block, page in enumerate(table[:2]):
        assert written(demand, page, 16) == written(whole, page, 16), block
    assert (demand.host[table[2]] == EMPTY).all()


def written(rig: Rig, page: int, tokens: int) -> bytes:
    """Returns what a page has of its first ``tokens`` tokens: of K and of V numbers, then a scale per head."""
    spec = rig.runner.spec
    group = spec.layout.groups[0]
    planes = rig.host[page].reshape(2, -1)
    numbers = 16 * group.kv_heads * group.head_dim
    rows = planes[:, :numbers].reshape(2, 16, -1)[:, :tokens]
    scales = planes[:, numbers : numbers + 16 * group.kv_heads * 4].reshape(2, 16, -1)[:, :tokens]
    return rows.tobytes() + scales.tobytes()


def apart(device: CudaLibrary) -> bool:
    """Returns whether a long chunk's pages, fetched in runs with gaps between them, differ from those written back,
    or a page that wasn't asked for changed.
    """
    whole, demand = Rig(device, None, 24), Rig(device, 64, 24)
    table = np.random.default_rng(6).permutation(24).tolist()
    plan = StepPlan((SequenceStep(0, [token % 300 for token in range(LONG)], 0, table, pool=True),))
    for rig in (whole, demand):
        rig.runner.run(plan)
    blocks = [0, 1, 2, 4, 5, 7, 11, 12, 13, 14]
    asked = [table[block] for block in blocks]
    before = demand.host.copy()
    demand.mirror.make_whole(asked)
    others = [page for page in range(24) if page not in asked]
    wrong = any(written(demand, page, 16) != written(whole, page, 16) for page in asked)
    wrong |= bool((demand.host[others] != before[others]).any())
    for rig in (whole, demand):
        rig.runner.close()
    return wrong


def test_a_long_chunks_pages_are_fetched_page_by_page_and_no_other_is(device: CudaLibrary) -> None:
    assert not apart(device)


@pytest.mark.thorough
def test_a_run_of_pages_that_leaves_one_out_is_noticed() -> None:
    assert apart(simt(("-DBATON_MUTATION_CUDA_STEP_PAGE_RUNS",)))


def test_pages_that_others_wrote_come_over_once_and_their_copies_go(rigs: list[Rig]) -> None:
    whole, demand = rigs
    asked = steps(trials.VOCAB, [40, 21])
    prompt = next(asked)
    whole.runner.run(prompt)
    brought = [page for item in prompt.items for page in item.pages[: -(-len(item.tokens) // 16)]]
    demand.mirror.taken(brought)
    demand.mirror.opened(brought)
    demand.host[brought] = whole.host[brought]  # a handoff over the host
    for _ in range(3):
        plan = next(asked)
        want, have = (rig.runner.run(plan) for rig in rigs)
        assert all(have.pooled[seq].last.tobytes() == want.pooled[seq].last.tobytes() for seq in (0, 1))
    assert demand.runner.counts()["admitted"] == 3 + 2
    assert demand.mirror.copies == 0
    page_bytes = demand.runner.spec.layout.page_bytes
    if page_bytes % 4096 == 0:
        assert not demand.host[brought].any(), "memory that was given back reads as zeros"
    again = StepPlan((SequenceStep(7, [5], 32, prompt.items[0].pages, pool=True),))
    want, have = (rig.runner.run(again) for rig in rigs)
    assert have.pooled[7].last.tobytes() == want.pooled[7].last.tobytes(), "a cached prefix is on the card"
    assert demand.runner.counts()["admitted"] == 3 + 2


def test_what_a_step_brings_stays_on_the_host_while_it_runs(rigs: list[Rig]) -> None:
    demand = rigs[1]
    page, before = 3, demand.host[3].copy()
    demand.mirror.taken([page])
    demand.mirror.opened([page])
    steps_ahead = demand.runner.async_steps
    assert steps_ahead is not None
    steps_ahead.submit(StepPlan((SequenceStep(0, [5], 16, [page, 4]),)))
    steps_ahead.submit(StepPlan((SequenceStep(0, [6], 17, [page, 4]),)))
    assert demand.mirror.copies == 1
    assert (demand.host[page] == before).all()
    steps_ahead.collect()
    assert demand.mirror.copies == 0
    steps_ahead.collect()


def test_the_log_says_where_kv_is(device: CudaLibrary, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "baton.engine")
    Rig(device, 1).runner.close()
    assert "of KV pages are on the card, and on the host while somebody reads them" in caplog.text
