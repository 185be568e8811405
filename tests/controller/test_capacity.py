"""Fills pools of several layouts by real decode loops, and compares what the controller, the profiler and the cost
policy make of a worker's pages with what really fits and really ships.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest

from baton.console.planning import liveprofile
from baton.controller import observation as observe
from baton.cost.curves import decode_seconds
from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.kv.layout.page import in_pages_of, layout_for, sliding_window
from baton.kv.layout.room import handoff_bytes, held_tokens, written_pages
from baton.kv.layout.tables import by_window, table_count
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.measurements import StepCurve, TransferCurve, WorkerLoad
from baton.protos.nouns import EngineRequest, KvLayout, LayerGroup, Sampling, WorkerInfo
from baton.router.policies import Candidate, ClusterSnapshot, RoutingRequest, load_policy
from bench.windows import Counting, measured, parts

PROMPT = 512
STEPS = 4  # between two prompts: answers are of all lengths, so that some are about to give pages back
CURVE = StepCurve(1e-3, 1e-5, 0.0, 0.0, 1e-6)  # a step's seconds say how many tokens are read


def of(*windows: tuple[int, int]) -> KvLayout:
    """Returns a layout of groups of (layers, window)."""
    groups = tuple(LayerGroup("g", ("k", "v"), layers, 1, 16, window) for layers, window in windows)
    return layout_for("float32", groups)


LAYOUTS = {
    "all see all": of((4, 0)),
    "divided, as Gemma's": by_window(of((1, 0), (5, 64))),
    "divided, as gpt-oss's": by_window(of((2, 0), (2, 128))),
    "not divided": of((2, 0), (2, 128)),
    "all see a window": of((4, 128)),
    "pages of 64 tokens": in_pages_of(of((4, 0)), 64),
}


def pages_of(layout: KvLayout) -> int:
    """Returns the pages of a pool that holds tens of sequences, beside which a prompt's own room is small."""
    return 900 * table_count(layout)


class FilledPool:
    """Is a decode worker that has taken prompts of about ``PROMPT`` tokens until one more doesn't fit."""

    def __init__(self, layout: KvLayout) -> None:
        runner = Counting("m", 16, vocab_size=1 << 20, max_model_len=1 << 16, step_seconds=lambda s: 0.0)
        runner.spec = msgspec.structs.replace(runner.spec, layout=layout)
        runner.pool = PagePool(pages_of(layout), layout.block_tokens)
        ids = itertools.count(1)
        limits = DecodeLimits(max_batch=256)
        self.loop = DecodeLoop(parts(runner), limits, lambda n: next(ids).to_bytes(n, "big"))
        self._sampling = Sampling(temperature=0.0, max_tokens=4096, ignore_eos=True)
        for key in range(1, limits.max_batch):
            if not self._takes(key):
                break

    def _takes(self, key: int) -> bool:
        prompt = PROMPT - 8 - 16 * (key % 4)  # windows give back in fours: not all at once
        request = EngineRequest(str(key), (key,) * prompt, prompt, self._sampling, 0)
        self.loop.turn([ch.Admit(key, request, True, 30.0)])
        for _ in range(STEPS):
            self.loop.turn([])
        return not self.loop.channel.of(ch.Refused) and not self.loop.scheduler.preemptions

    @property
    def running(self) -> int:
        return len(self.loop.scheduler.running)

    @property
    def tokens(self) -> int:
        """Returns the tokens of context of all sequences together."""
        return sum(len(job.sequence.tokens) for job in self.loop.scheduler.running)

    @property
    def load(self) -> WorkerLoad:
        counts = self.loop.pool.snapshot_counts()
        return WorkerLoad(
            running=self.running,
            leased_pages=counts.leased,
            free_pages=counts.free,
            cached_pages=counts.cached,
            step_curve=CURVE,
            transfer_curve=TransferCurve(0.0, 1.0),  # a second per byte
            decode_tokens_per_s=1.0,
        )


def info_of(layout: KvLayout, role: str = "decode") -> WorkerInfo:
    return WorkerInfo(role, "i", role, "", "m", "f", layout, 1 << 16, 100, (), pages_of(layout), max_batch=256)


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def filled(request: pytest.FixtureRequest) -> FilledPool:
    return FilledPool(request.param)


def test_the_controller_counts_with_as_many_tokens_as_fit_and_finds_a_full_pool_full(filled: FilledPool) -> None:
    seen = observe.ObservedWorker(info_of(filled.loop.spec.layout), filled.load)
    known = observe.costs([seen], 512, 1.0, 10.0, filled.tokens / filled.running)
    assert known is not None
    assert known.kv_tokens == pytest.approx(filled.tokens, rel=0.15)
    full = observe.fullness(seen, 512, 1.0, 10.0, 30.0)
    assert full is not None
    assert 0.9 < full < 1.2
    half = msgspec.structs.replace(seen.load, running=filled.running // 2, leased_pages=seen.load.leased_pages // 2)
    assert 0.4 < (observe.fullness(observe.ObservedWorker(seen.info, half), 512, 1.0, 10.0, 30.0) or 0.0) < 0.65


def test_leased_pages_tell_the_tokens_that_are_read_unless_every_layer_forgets_them(filled: FilledPool) -> None:
    layout, load = filled.loop.spec.layout, filled.load
    found = held_tokens(layout, load.leased_pages, load.running)
    known = filled.tokens if not sliding_window(layout) else load.leased_pages * layout.block_tokens
    assert found == pytest.approx(known, rel=0.15)
    assert load.leased_pages == pytest.approx(
        filled.running * written_pages(layout, filled.tokens / filled.running), rel=0.15
    )


def test_the_cost_policy_expects_the_step_that_the_pools_tokens_take(filled: FilledPool) -> None:
    layout, load = filled.loop.spec.layout, filled.load
    candidate = Candidate(info_of(layout), load, sequences=load.running)
    reader = Candidate(info_of(layout, "prefill"), load)
    decision = load_policy("cost")(ClusterSnapshot((reader,), (candidate,)), RoutingRequest(16, 1))
    assert decision is not None
    terms = next(option.terms for option in decision.options if option.way == "prefill")
    read = filled.tokens if not sliding_window(layout) else load.leased_pages * layout.block_tokens
    assert terms["write"] == pytest.approx(decode_seconds(CURVE, load.running + 1, read + 16), rel=0.15)


def test_a_measured_profile_has_the_pool_and_the_bytes_of_the_context_that_it_names(
    filled: FilledPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = round(filled.tokens / filled.running)
    monkeypatch.setattr(liveprofile, "CONTEXTS", (context,))
    layout = filled.loop.spec.layout
    about, _, kv_tokens, size = liveprofile.described(info_of(layout), 4096, CURVE)
    assert kv_tokens == pytest.approx(filled.tokens, rel=0.15)
    assert (f"contexts of {context} tokens" in about) == (kv_tokens != pages_of(layout) * layout.block_tokens)
    assert size == handoff_bytes(layout, context) // context


@pytest.mark.parametrize("prompt", [16, 512, 2048])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "64" not in name])
def test_a_handoff_is_expected_to_send_about_the_bytes_that_it_sends(name: str, prompt: int) -> None:
    layout = LAYOUTS[name]
    sent = measured(layout, prompt, 40)[0] * layout.page_bytes
    assert handoff_bytes(layout, prompt) == pytest.approx(sent, rel=0.15, abs=2 * layout.page_bytes)
