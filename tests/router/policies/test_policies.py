"""Every policy in the folder keeps one contract; then what each is for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.layout.page import layout_for
from baton.kv.layout.tables import by_window
from baton.protos.errors import ConfigError
from baton.protos.measurements import StepCurve, TransferCurve, WorkerLoad
from baton.protos.nouns import KvLayout, LayerGroup, WorkerInfo
from baton.router import policies
from baton.router.policies import Candidate, ClusterSnapshot, RoutingRequest, fits, has_room, load_policy, names

LAYOUT = KvLayout("float32", (), 4096, "float32")
CURVE = StepCurve(1e-3, 1e-4, 1e-9, 1e-3, 1e-8)


def worker(worker_id: str, role: str, fingerprint: str = "f", max_batch: int = 8, **fields) -> Candidate:
    info = WorkerInfo(
        worker_id, "1", role, "a:1", "m", fingerprint, LAYOUT, 4096, 1000, (), 100, max_batch=max_batch
    )
    load = fields.pop("load", WorkerLoad(step_curve=CURVE, transfer_curve=TransferCurve(1e-3, 1e-9)))
    return Candidate(info, load, **fields)


def snapshot(prefill=(), decode=(), **fields) -> ClusterSnapshot:
    return ClusterSnapshot(tuple(prefill), tuple(decode), **fields)


def pool(p: int, d: int, **fields) -> ClusterSnapshot:
    prefill = [worker(f"p{i}", "prefill") for i in range(p)]
    return snapshot(prefill, [worker(f"d{i}", "decode") for i in range(d)], **fields)


counts = st.integers(0, 9)
candidates = st.builds(
    worker,
    worker_id=st.just("x"),
    role=st.just("decode"),
    fingerprint=st.sampled_from(["f", "g"]),
    sequences=counts,
    pending_prompts=counts,
    pending_tokens=st.integers(0, 9000),
    full=st.booleans(),
    load=st.builds(WorkerLoad, running=counts, waiting=counts, waiting_tokens=st.integers(0, 9000)),
)


def renamed(many: list[Candidate], letter: str) -> tuple[Candidate, ...]:
    info = msgspec.structs.replace
    return tuple(info(c, info=info(c.info, worker_id=f"{letter}{i}")) for i, c in enumerate(many))


def of_kind(candidate: Candidate, own: bool, pages: int = 100, bridges: bool = True) -> Candidate:
    """``candidate`` with pages of all layers of a model that has some with a window, or (``own``) with pages by
    window.
    """
    groups = LayerGroup("full", ("k", "v"), 1, 1, 8), LayerGroup("window", ("k", "v"), 3, 1, 8, 32)
    layout = layout_for("float32", groups)
    info = msgspec.structs.replace(
        candidate.info, layout=by_window(layout) if own else layout, pages=pages, bridges_windows=bridges
    )
    return msgspec.structs.replace(candidate, info=info)


# ---- the contract ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
@given(data=st.data())
def test_a_policy_takes_only_workers_that_fit_and_have_room(name, data):
    snap = ClusterSnapshot(
        renamed(data.draw(st.lists(candidates, max_size=4)), "p"),
        renamed(data.draw(st.lists(candidates, max_size=4)), "d"),
        turn=data.draw(st.integers(0, 1000)),
    )
    hits = {c.id: data.draw(st.integers(0, 40)) for c in (*snap.prefill, *snap.decode)}
    ask = RoutingRequest(
        data.draw(st.integers(1, 600)), data.draw(st.integers(1, 500)), hits, frozenset({"p0", "d0"})
    )
    decision = load_policy(name)(snap, ask)
    assert decision == load_policy(name)(snap, ask)
    if decision is None:
        return
    taken, by_id = decision.taken, {c.id: c for c in (*snap.prefill, *snap.decode)}
    assert decision.policy == name
    assert by_id[taken.decode].sequences < 8
    assert not by_id[taken.decode].full
    assert has_room(by_id[taken.reader], ask.uncached(taken.reader), snap.window_tokens)
    assert (taken.way == "local") == (taken.prefill == "")
    assert taken.way == "local" or fits(by_id[taken.prefill], by_id[taken.decode])
    assert taken in decision.options
    assert msgspec.json.encode(decision)


@pytest.mark.parametrize("name", names())
def test_a_policy_without_workers_or_room_chooses_nobody(name):
    choose = load_policy(name)
    assert choose(pool(0, 0), RoutingRequest(10, 10)) is None
    assert choose(pool(2, 0), RoutingRequest(10, 10)) is None
    busy = [worker("p0", "prefill", pending_prompts=2, pending_tokens=5000)]
    assert choose(snapshot(busy, [worker("d0", "decode")]), RoutingRequest(1000, 10)) is None
    crowded = [worker("d0", "decode", sequences=8)]
    assert choose(snapshot([worker("p0", "prefill")], crowded), RoutingRequest(1000, 10)) is None


@pytest.mark.parametrize("name", names())
def test_a_policy_sends_short_rests_the_local_way_and_long_ones_to_prefill(name):
    choose, snap = load_policy(name), pool(1, 1)
    assert choose(snap, RoutingRequest(40, 10)).taken.way == "local"
    assert choose(snap, RoutingRequest(1000, 10)).taken.way == "prefill"
    assert choose(snap, RoutingRequest(1000, 10, {"d0": 60})).taken.way == "local"
    assert choose(pool(0, 1), RoutingRequest(1000, 10)).taken.way == "local"


@pytest.mark.parametrize("name", names())
def test_a_policy_never_pairs_workers_of_other_weights(name):
    decode = [worker("d0", "decode", "new")]
    old = [worker("p0", "prefill", "old")]
    assert load_policy(name)(snapshot(old, decode), RoutingRequest(1000, 10)).taken.way == "local"
    both = [*old, worker("p1", "prefill", "new")]
    assert load_policy(name)(snapshot(both, decode), RoutingRequest(1000, 10)).taken.prefill == "p1"


@pytest.mark.parametrize("name", names())
def test_a_policy_pairs_workers_that_divide_pages_of_windows_alike(name):
    """A rolling upgrade has such pairs: its older workers share pages."""
    groups = tuple(LayerGroup(f"w{window}", ("k", "v"), 4, 2, 8, window) for window in (0, 32))
    shared = layout_for("float32", groups)

    def of(worker_id: str, role: str, layout: KvLayout) -> Candidate:
        found = worker(worker_id, role)
        return msgspec.structs.replace(found, info=msgspec.structs.replace(found.info, layout=layout))

    old, decode = of("p0", "prefill", shared), of("d0", "decode", by_window(shared))
    assert load_policy(name)(snapshot([old], [decode]), RoutingRequest(1000, 10)).taken.way == "local"
    both = [old, of("p1", "prefill", by_window(shared))]
    assert load_policy(name)(snapshot(both, [decode]), RoutingRequest(1000, 10)).taken.prefill == "p1"


@pytest.mark.parametrize("name", names())
def test_a_policy_avoids_who_failed_before_unless_there_is_nobody_else(name):
    choose = load_policy(name)
    for turn in range(4):
        taken = choose(pool(2, 2, turn=turn), RoutingRequest(1000, 10, {}, frozenset({"p0", "d1"}))).taken
        assert (taken.prefill, taken.decode) == ("p1", "d0")
    assert choose(pool(1, 1), RoutingRequest(1000, 10, {}, frozenset({"p0", "d0"}))).taken.prefill == "p0"


@pytest.mark.parametrize("name", names())
def test_equal_workers_take_turns(name):
    choose = load_policy(name)
    taken = [choose(pool(2, 2, turn=turn), RoutingRequest(1000, 10)).taken for turn in range(8)]
    assert {t.prefill for t in taken} == {"p0", "p1"}
    assert {t.decode for t in taken} == {"d0", "d1"}


def test_an_unknown_policy_lists_the_choices():
    with pytest.raises(ConfigError, match=", ".join(names())):
        load_policy("magic")


def test_a_short_prompt_joins_a_lone_long_one_and_a_second_long_one_waits():
    reading = worker("p0", "prefill", pending_prompts=1, pending_tokens=50_000)
    assert has_room(reading, 100, 4096)
    assert not has_room(reading, 50_000, 4096)
    assert not has_room(worker("p0", "prefill", full=True), 1, 8192)


# ---- each one's intent -------------------------------------------------------------------------------


def test_least_loaded_takes_the_shortest_line_and_the_emptiest_batch():
    prefill = [worker("p0", "prefill", pending_prompts=1, pending_tokens=4000), worker("p1", "prefill")]
    decode = [worker("d0", "decode", sequences=1), worker("d1", "decode", sequences=5)]
    taken = load_policy("least_loaded")(snapshot(prefill, decode), RoutingRequest(1000, 10)).taken
    assert (taken.prefill, taken.decode) == ("p1", "d0")


def test_least_loaded_believes_whichever_source_knows_of_more():
    others = worker("p0", "prefill", load=WorkerLoad(waiting_tokens=5000))
    taken = load_policy("least_loaded")(
        snapshot([others, worker("p1", "prefill")], [worker("d0", "decode")]), RoutingRequest(1000, 10)
    ).taken
    assert taken.prefill == "p1"


def test_cost_prefers_a_cached_prefix_to_an_idle_worker():
    far = WorkerLoad(step_curve=CURVE, transfer_curve=TransferCurve(1e-3, 1e-9), fetch_curve=TransferCurve(1.0, 0))
    prefill = [
        worker("p0", "prefill", load=far),
        worker("p1", "prefill", pending_prompts=1, pending_tokens=200),
    ]
    snap = snapshot(prefill, [worker("d0", "decode")])
    assert load_policy("cost")(snap, RoutingRequest(4000, 64)).taken.prefill == "p0"
    assert load_policy("cost")(snap, RoutingRequest(4000, 64, {"p1": 243})).taken.prefill == "p1"


def test_cost_leaves_a_cached_prefix_whose_worker_has_too_long_a_line():
    prefill = [worker("p0", "prefill"), worker("p1", "prefill", pending_prompts=1, pending_tokens=3000)]
    snap = snapshot(prefill, [worker("d0", "decode")])
    assert load_policy("cost")(snap, RoutingRequest(1000, 64, {"p1": 60})).taken.prefill == "p0"


def test_cost_ships_to_the_decode_worker_that_holds_the_blocks():
    slow = WorkerLoad(step_curve=CURVE, transfer_curve=TransferCurve(1e-3, 1e-6))
    snap = snapshot([worker("p0", "prefill", load=slow)], [worker("d0", "decode"), worker("d1", "decode")])
    assert load_policy("cost")(snap, RoutingRequest(1000, 64, {"d1": 50, "p0": 60})).taken.decode == "d1"


def test_cost_does_not_interrupt_a_busy_batch_with_a_prompt_that_prefill_can_read():
    crowded = [worker("d0", "decode", sequences=7, load=WorkerLoad(step_curve=CURVE, running=7))]
    snap = snapshot([worker("p0", "prefill")], crowded)
    assert load_policy("cost")(snap, RoutingRequest(60, 64)).taken.way == "prefill"
    assert load_policy("cost")(
        snapshot([worker("p0", "prefill")], [worker("d0", "decode")]), RoutingRequest(60, 64)
    ).taken.way == ("local")


def test_cost_counts_a_slower_worker_as_slower():
    slow = WorkerLoad(step_curve=StepCurve(1e-3, 1e-3, 1e-9, 1e-3, 1e-8))
    snap = snapshot([worker("p0", "prefill", load=slow), worker("p1", "prefill")], [worker("d0", "decode")])
    for turn in range(3):
        taken = load_policy("cost")(msgspec.structs.replace(snap, turn=turn), RoutingRequest(1000, 64)).taken
        assert taken.prefill == "p1"


def test_cost_says_what_each_way_would_cost():
    decision = load_policy("cost")(pool(2, 2), RoutingRequest(1000, 64))
    assert {"queue", "read", "ship", "write", "harm"} == decision.taken.terms.keys()
    assert len(decision.options) == 4
    assert decision.options[0].cost == decision.taken.cost


def test_cost_pays_for_what_an_slo_would_miss():
    """Alone it would share p1's cached prefix; with little time it goes where nobody waits."""
    prefill = [worker("p0", "prefill"), worker("p1", "prefill", pending_prompts=1, pending_tokens=1900)]
    snap = snapshot(prefill, [worker("d0", "decode")])
    ask = RoutingRequest(2000, 64, {"p1": 12})
    assert load_policy("cost")(snap, ask).taken.prefill == "p0"
    late = load_policy("cost")(snap, msgspec.structs.replace(ask, slo_ttft_s=0.1, slo_tpot_s=1e-4)).taken
    assert late.prefill == "p0"
    assert late.terms["late"] > 0


@pytest.mark.parametrize("name", names())
def test_every_policy_has_a_page_of_its_own(name):
    page = (Path(policies.__path__[0]) / f"{name}.md").read_text()
    assert page.startswith(f"# {name}\n")
    assert all(word in page for word in ("**Inputs.", "**Formula", "**Intent.", "**Example."))


# ---- pages by window beside pages of all layers ---------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
def test_a_worker_that_converts_pages_fits_those_of_the_other_kind(own: bool) -> None:
    p, d = worker("p", "prefill"), worker("d", "decode")
    assert fits(of_kind(p, own), of_kind(d, not own), 100)
    assert not fits(of_kind(p, own, bridges=False), of_kind(d, not own), 100), "an older build refuses it"
    assert fits(of_kind(p, own, bridges=False), of_kind(d, own), 100)


def test_a_prompt_whose_whole_blocks_have_no_room_goes_elsewhere_or_is_read_where_it_is_written() -> None:
    d, small = of_kind(worker("d", "decode"), False), of_kind(worker("small", "prefill"), True, pages=40)
    large = of_kind(worker("large", "prefill"), True, pages=80)
    assert fits(small, d, 160)
    assert not fits(small, d, 161), "four pages of each of eleven blocks"
    many = RoutingRequest(161, 8)
    for name in names():
        choose = load_policy(name)
        decision = choose(snapshot([small, large], [d]), many)
        assert decision is not None
        assert decision.taken.prefill in ("large", ""), name
        decision = choose(snapshot([small], [d]), many)
        assert decision is not None
        assert decision.taken.way == "local", name


def test_a_worker_that_failed_before_is_taken_again_where_the_other_cannot_serve() -> None:
    d, small = of_kind(worker("d", "decode"), False), of_kind(worker("small", "prefill"), True, pages=40)
    failed, others = worker("failed", "prefill"), worker("others", "prefill", fingerprint="g")
    again = RoutingRequest(161, 8, {}, frozenset({"failed"}))
    for name in names():
        for cluster in (
            snapshot([of_kind(failed, False), small], [d]),
            snapshot([failed, others], [worker("d", "decode")]),
        ):
            decision = load_policy(name)(cluster, again)
            assert decision is not None, name
            assert decision.taken.prefill == "failed", name
