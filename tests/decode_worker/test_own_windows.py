"""Layers with a window in pages of their own, beside layers that see all: these are given back behind the window
and never shipped, and answers stay the same.

Real checkpoints, real loops on both sides, blocks copied by hand. Whatever no lease has is evicted and overwritten
between any two steps (``Side.finish``), so a token that read a page given back would be another.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.abilities import ranks_of
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.wide_pages import widened
from baton.kv.layout import prefix
from baton.kv.layout.bridge import bridge
from baton.kv.layout.room import prompt_pages
from baton.kv.layout.tables import MARK
from baton.kv.pages.lease import LEAST_SLIDE
from baton.kv.pages.tables import parts_of, seen_behind, table_hash
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.errors import ConfigError, LayoutMismatch
from baton.protos.nouns import EngineRequest, KvLayout
from baton.worker.engine_main import build
from tests.conformance.checkpoints import make
from tests.conformance.drive import Driver
from tests.decode_worker.states import Pair, Worker
from tests.decode_worker.test_windows import ANSWER, VOCAB, Side, hand_over, prompt_of, request
from tests.engine.backends.ranks.threads import on_ranks
from tests.engine.speculate.oracle import Eager, Oracle
from tests.thorough import later
from tests.worker.test_engine_main import Wire, spec

# With the windows of their page tables; half of gemma3n's layers read the pages of the others.
KINDS = {"gemma3": (0, 29, 29, 29), "gpt_oss": (0, 33, 33), "gemma3n": (0, 21, 21)}
OWN = {"window_pages": "own"}
LENGTHS = (5, 33, 300)


@pytest.fixture(scope="module", params=["gemma3", later("gpt_oss"), later("gemma3n")])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("mixed") / kind, kind, vocab_size=1013)


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[int, list[int]]:
    """Answers to prompts by length, with every page kept."""
    driver = Driver(load_runner(EngineConfig(str(model), threads=1, dtype="float32")), pages=80)
    return {n: driver.answer([prompt_of(n)], ANSWER)[0] for n in LENGTHS}


def own(model: Path, loop: type, pages: int = 120) -> Side:
    return Side(model, loop, pages, **OWN)


def layout_of(side: Side) -> KvLayout:
    return side.loop.spec.layout


def most(windows: tuple[int, ...], tokens: int) -> int:
    """Pages that a sequence of so many tokens may lease while it is written."""
    kept = sum(-(-window // 16) + 2 + LEAST_SLIDE for window in windows[1:])
    return -(-tokens // 16) + kept


@pytest.mark.parametrize("length", LENGTHS)
def test_a_handoff_ships_of_layers_with_a_window_what_it_shows(
    kind: str, model: Path, wanted: dict[int, list[int]], length: int
) -> None:
    prefill, decode = own(model, PrefillLoop), own(model, DecodeLoop)
    shipped = hand_over(prefill, decode, prompt_of(length))
    decode.finish()
    assert decode.tokens(1) == wanted[length]
    blocks, windows = -(-length // 16), KINDS[kind]
    shown = [blocks - max(0, length - window + 1) // 16 for window in windows[1:]]
    assert sorted(shipped) == list(range(blocks + sum(shown)))
    assert decode.most <= most(windows, length + ANSWER.max_tokens)
    assert prefill.most <= prompt_pages(layout_of(prefill), blocks, 48)
    for side in (prefill, decode):
        side.pool.check()
        assert side.loop.snapshot().at_baseline


def test_a_worker_that_reads_the_prompt_itself_gives_pages_back_as_it_reads(
    kind: str, model: Path, wanted: dict[int, list[int]]
) -> None:
    decode = own(model, DecodeLoop)
    decode.say(ch.Admit(1, request(prompt_of(300)), True, 30.0))
    decode.finish()
    assert decode.tokens(1) == wanted[300]
    assert decode.pool.snapshot_counts().leased == 0
    chunk = 48 // 16 * len(KINDS[kind])
    assert decode.most <= most(KINDS[kind], 300 + ANSWER.max_tokens) + chunk, (
        "it leases a window's pages as it goes"
    )


@pytest.mark.parametrize("role", [PrefillLoop, DecodeLoop])
@pytest.mark.parametrize("kept", [True, False])
def test_a_prefix_is_found_as_far_as_the_windows_pages_are_there(
    kind: str, model: Path, wanted: dict[int, list[int]], role: type, kept: bool
) -> None:
    side, prompt, windows = own(model, role), prompt_of(300), KINDS[kind]
    local = role is DecodeLoop

    def ask(key: int) -> None:
        side.say(ch.Admit(key, request(prompt), True, 30.0) if local else ch.Prefill(key, request(prompt), 0, ()))
        side.finish(forget=False)
        if not local:
            side.say(ch.SendClosed(key))

    ask(1)
    chain = [block for block in side.pool.blocks.page_of if table_hash(block, 1) in side.pool.blocks.page_of][:18]
    shown = 0 if not kept else 3
    named = [table_hash(block, n) for n in range(1, len(windows)) for block in chain[18 - shown :]]
    pages = [side.pool.keep(block) for block in [*chain, *named]]
    side.forget()
    for page in pages:
        side.pool.unkeep(page)
    ask(2)
    if local:
        outputs = [o for t in side.tape.of(ch.Tokens) for o in t.outputs if o.key == 2]
        assert sum(o.cached_tokens for o in outputs) == (18 * 16 if kept else 0)
        assert side.tokens(2) == wanted[300]
    else:
        done = side.tape.of(ch.PrefillDone)[1]
        assert done.cached_tokens == (18 * 16 if kept else 0)
        assert done.first.token_ids[0] == wanted[300][0]


def test_prompts_read_at_once_leave_each_other_the_pages_of_their_windows(
    kind: str, model: Path, wanted: dict[int, list[int]]
) -> None:
    """Three prompts in a pool that holds two: none takes what another needs for its next chunk."""
    side = own(model, PrefillLoop, pages=2 * prompt_pages(layout_of(own(model, PrefillLoop)), 19, 48))
    for key, length in enumerate((300, 200, 120), 1):  # each shorter than what is left of those before
        side.say(ch.Prefill(key, request(prompt_of(length, seed=key)), 0, ()))
    assert sum(job.lease is not None for job in side.loop.scheduler.jobs.values()) == 2
    for _ in range(100):
        if not side.loop.turn([]) and len(side.tape.of(ch.PrefillDone)) == 3:
            break
        side.pool.check()
        side.forget()
        for done in side.tape.of(ch.PrefillDone):
            side.say(ch.SendClosed(done.key))
    firsts = {done.key: done.first.token_ids[0] for done in side.tape.of(ch.PrefillDone)}
    assert firsts[1] == wanted[300][0]
    assert len(firsts) == 3
    assert not side.tape.of(ch.PrefillFailed)
    assert side.loop.snapshot().at_baseline


def test_a_prompt_gives_way_where_pages_that_it_will_need_are_pinned(kind: str, model: Path) -> None:
    side = own(model, PrefillLoop, pages=2 * prompt_pages(layout_of(own(model, PrefillLoop)), 19, 48))
    for key, length in enumerate((300, 200), 1):
        side.say(ch.Prefill(key, request(prompt_of(length, seed=key)), 0, ()))
    taken = side.pool.open((), side.pool.available)
    while side.loop.turn([]):
        side.pool.check()
    failed = side.tape.of(ch.PrefillFailed)
    assert [(one.key, one.error.type) for one in failed] == [(1, "PoolExhausted")]
    taken.close()
    side.say(ch.SendClosed(1))
    side.finish(forget=False)
    assert [done.key for done in side.tape.of(ch.PrefillDone)] == [2]
    side.say(ch.SendClosed(2))
    assert side.loop.snapshot().at_baseline


@pytest.mark.parametrize("fill", [False, True], ids=["pin", "fill"])
def test_what_runs_keeps_the_pages_that_it_needs_where_its_window_is_pinned(
    kind: str, model: Path, wanted: dict[int, list[int]], fill: bool
) -> None:
    """A pin takes no available page where a running prompt has all of them, but these don't come back to it as its
    window passes them.
    """
    runner = load_runner(EngineConfig(str(model), threads=1, dtype="float32", **OWN))
    blocks, windows = -(-300 // 16), KINDS[kind]
    side = Side(model, PrefillLoop, prompt_pages(runner.spec.layout, blocks, 48), runner)
    side.say(ch.Prefill(1, request(prompt_of(300)), 0, ()))
    refused = 0
    for turn in range(60):
        found = side.pool.blocks.page_of
        named = [table_hash(block, n) for block in list(found) for n in range(1, len(windows))]
        own = tuple(name for name in named if name in found and side.pool.leased.more_than(0, [found[name]]))
        if own:
            side.say(ch.Fill(-turn, own) if fill else ch.Pin(turn, own))
            refused += not side.tape.of(ch.Filling if fill else ch.Pinned)[-1].pages
        elif not side.loop.turn([]):
            break
    done = side.tape.of(ch.PrefillDone)
    assert [one.first.token_ids[0] for one in done] == [wanted[300][0]]
    assert refused


def test_an_answer_from_a_prefix_that_another_worker_read_is_the_same(
    kind: str, model: Path, wanted: dict[int, list[int]]
) -> None:
    """The pages that a fetch or a lower tier brings, as ``Warmer`` asks for them: windows first."""
    holder, asker, prompt = own(model, PrefillLoop), own(model, DecodeLoop), prompt_of(300)
    holder.say(ch.Prefill(1, request(prompt), 0, ()))
    holder.finish(forget=False)
    spec = holder.loop.spec
    blocks = prefix.chain(prefix.root(spec.fingerprint, spec.layout.fidelity), prompt, 16)[:18]
    for names in (seen_behind(blocks, KINDS[kind], 16), blocks):
        asker.say(ch.Fill(-2, tuple(names)))
        filling = asker.tape.of(ch.Filling)[-1]
        for name, page in zip(names, filling.pages, strict=True):
            asker.memory.page(page)[:] = holder.memory.page(holder.pool.blocks.page_of[name])
        asker.say(ch.Filled(-2, len(names)))
    asker.say(ch.Admit(1, request(prompt), True, 30.0))
    asker.finish()
    assert sum(o.cached_tokens for t in asker.tape.of(ch.Tokens) for o in t.outputs) == 18 * 16
    assert asker.tokens(1) == wanted[300]


def test_a_second_prefill_brings_what_the_first_did_not(model: Path, wanted: dict[int, list[int]]) -> None:
    runner = load_runner(EngineConfig(str(model), threads=1, dtype="float32", **OWN))
    pair, prompt = Pair(runner), list(prompt_of(33))
    admitted = pair.decode.admit(1, prompt, local=False, max_tokens=ANSWER.max_tokens)
    pair.move(pair.compute(1, prompt, admitted.held_blocks), admitted, most=4)
    rearmed = next(m for m in pair.decode.say(ch.Rearm(1, admitted.lease, 2)) if isinstance(m, ch.Rearmed))
    assert len(rearmed.received_blocks) == 4
    pair.decode.say(ch.ReceiveClosed(1, 1))
    first, pair.prefill = pair.prefill, Worker(runner, 400, "prefill", chunk=32)
    said = pair.compute(2, prompt, admitted.held_blocks, rearmed.received_blocks)
    pair.move(said, admitted, epoch=2)
    pair.commit(said, 1, epoch=2)
    pair.decode.finish()
    assert pair.decode.tokens(1) == wanted[33]
    first.say(ch.SendClosed(1))
    assert all(worker.at_baseline() for worker in (first, pair.prefill, pair.decode))


def test_an_answer_that_goes_on_elsewhere_stays_the_same(model: Path, wanted: dict[int, list[int]]) -> None:
    begun = (*prompt_of(33), *wanted[33][:50])
    rest = EngineRequest("r", begun, 33, msgspec.structs.replace(ANSWER, max_tokens=120), 0)
    prefill, decode = own(model, PrefillLoop), own(model, DecodeLoop)
    hand_over(prefill, decode, begun, rest)
    decode.finish()
    assert decode.tokens(1) == wanted[33][50:]


@pytest.mark.parametrize(
    ("read_by", "written_by"),
    [({"tp": 2}, {}), pytest.param({"pp": 2}, {"tp": 2}, marks=pytest.mark.thorough), ({}, {"pp": 2})],
    ids=str,
)
def test_ranks_hand_over_to_other_numbers_of_ranks(
    model: Path, wanted: dict[int, list[int]], read_by: dict[str, int], written_by: dict[str, int]
) -> None:
    config = EngineConfig(str(model), threads=1, dtype="float32", rank_bound_s=60.0, **OWN)
    alone = load_runner(config)
    leads = [
        on_ranks(alone.spec, msgspec.structs.replace(config, **widths)) if widths else alone
        for widths in (read_by, written_by)
    ]
    prefill, decode = Side(model, PrefillLoop, 120, leads[0]), Side(model, DecodeLoop, 120, leads[1])
    try:
        shipped = hand_over(prefill, decode, prompt_of(300))
        decode.finish()
        windows = alone.spec.layout.windows
        assert decode.tokens(1) == wanted[300]
        assert len(shipped) == 19 + sum(19 - (300 - window + 1) // 16 for window in windows[1:])
        assert decode.most <= most(windows, 300 + ANSWER.max_tokens)
        assert all(side.loop.snapshot().at_baseline for side in (prefill, decode))
    finally:
        for lead in leads:
            if (ranks := ranks_of(lead)) is not None:
                ranks.leave()


def test_preempted_sequences_go_on_as_they_would_have(model: Path, wanted: dict[int, list[int]]) -> None:
    side = own(model, DecodeLoop, pages=64)
    loop = side.loop
    assert isinstance(loop, DecodeLoop)
    assert loop.swap is None, "what is set aside is of one page table"
    side.say(*(ch.Admit(key, request(prompt_of(33)), True, 30.0) for key in (1, 2, 3)))
    for at in range(600):
        if not loop.turn([]):
            break
        if at % 50 == 30 and loop.scheduler.running:
            loop.scheduler._preempt(loop.scheduler.running[-1])
        side.pool.check()
        side.forget()
    assert loop.scheduler.preemptions
    assert [side.tokens(key) for key in (1, 2, 3)] == [wanted[33]] * 3


def test_drafts_change_nothing(model: Path, wanted: dict[int, list[int]]) -> None:
    side = own(model, DecodeLoop)
    loop = side.loop
    assert isinstance(loop, DecodeLoop)
    drafter = Eager(Oracle({"r": wanted[300]}, 0.7, VOCAB))
    loop.drafter = loop.scheduler.drafter = drafter
    side.say(ch.Admit(1, request(prompt_of(300)), True, 30.0))
    side.finish()
    assert side.tokens(1) == wanted[300]
    assert drafter.tally.verified


def test_pages_of_48_tokens_give_the_same_answers(model: Path, wanted: dict[int, list[int]]) -> None:
    runner = load_runner(EngineConfig(str(model), threads=1, dtype="float32", **OWN))
    pair = Pair(widened(runner, 48), pages=120)
    assert pair.answer(1, list(prompt_of(300))) == wanted[300][:40]
    shown = len(parts_of(runner.spec.layout.windows, 300, 48))
    assert pair.shipped == 7 + shown * 2
    assert pair.prefill.at_baseline()
    assert pair.decode.at_baseline()


def test_pages_of_the_other_kind_are_never_taken_unconverted(model: Path) -> None:
    shared, divided = (
        load_runner(EngineConfig(str(model), threads=1, dtype="float32", window_pages=pages)).spec.layout
        for pages in ("shared", "own")
    )
    assert divided.fidelity == shared.fidelity + MARK
    for ours, theirs in ((shared, divided), (divided, shared)):
        with pytest.raises(LayoutMismatch, match=r"windows: sender .*fidelity: sender"):
            bridge(ours, theirs)
    with pytest.raises(LayoutMismatch, match="pages of layers with a window"):
        bridge(divided, msgspec.structs.replace(divided, block_tokens=32, page_bytes=2 * divided.page_bytes))


def test_what_has_no_pages_by_window_is_refused_by_name(model: Path) -> None:
    selects = "sinks:16,window:32"
    with pytest.raises(ConfigError, match=f"kv_selection {selects}") as refused:
        load_runner(EngineConfig(str(model), threads=2, dtype="float32", kv_selection=selects, **OWN))
    assert refused.value.param == "worker.window_pages"


def test_auto_divides_pages_where_that_is_possible(model: Path, kind: str) -> None:
    def windows(**settings: object) -> tuple[int, ...]:
        config = EngineConfig(str(model), threads=1, dtype="float32", window_pages="auto", **settings)  # type: ignore[arg-type]
        return load_runner(config).spec.layout.windows

    assert windows() == KINDS[kind]
    assert windows(kv_selection="sinks:16,window:32") == ()


@pytest.mark.parametrize(
    ("settings", "divided"),
    [({}, True), ({"kv_codec": "int8"}, False), ({"window_pages": "shared"}, False)],
    ids=str,
)
def test_a_worker_divides_pages_by_itself_and_keeps_its_memory(
    model: Path, kind: str, settings: dict[str, str], divided: bool
) -> None:
    wire = Wire()
    build(spec(device="cpu", model=str(model), threads=1, dtype="float32", **settings), wire)  # type: ignore[arg-type]
    ready = wire.sent[1]
    assert ready.layout.windows == (KINDS[kind] if divided else ())
    assert ready.pages == 16 * (len(KINDS[kind]) if divided else 1)


def test_a_model_of_one_kind_of_layers_has_one_page_table(tmp_path: Path) -> None:
    directory = make(tmp_path / "mistral", "mistral", sliding_window=37)
    runner = load_runner(EngineConfig(str(directory), threads=1, dtype="float32", **OWN))
    assert runner.spec.layout.windows == ()
    assert MARK not in runner.spec.layout.fidelity


def test_parts_of_a_handoff_follow_one_another() -> None:
    parts = parts_of((0, 32, 100), 330, 16)
    assert [(part.number, part.first, part.at) for part in parts] == [(1, 18, 21), (2, 14, 24)]
    assert all(before.at < after.at for before, after in pairwise(parts))
