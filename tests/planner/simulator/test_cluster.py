"""Tests the simulated cluster: nothing is lost, the same seed gives the same answer, compressed is as
uncompressed.
"""

import hashlib
import random
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.pages.pool import PagePool
from baton.planner.costs.speculation import with_acceptance
from baton.planner.costs.worker import WorkerCosts, worker_costs
from baton.planner.figures import distribution
from baton.planner.score import tpot, ttft
from baton.planner.simulator.cluster import ClusterScenario, ClusterSim, SimSettings
from baton.planner.simulator.flight import BlockIds, Flight, own_block
from baton.planner.traces.trace import Trace, TraceRequest, read_trace
from baton.protos.errors import ConfigError
from baton.router.policies import names

DATA = Path(__file__).parents[2] / "data"
LARGE, SMALL = worker_costs("roofline:llama-3-70b@a800x8"), worker_costs("roofline:llama-3-8b@h100")


def mooncake(seconds: float) -> Trace:
    return read_trace(str(DATA / "mooncake_conversation_400.jsonl")).between(0, seconds)


def run(trace: Trace, prefill: int, decode: int, costs: WorkerCosts = LARGE, **more: object) -> ClusterSim:
    sim = ClusterSim(ClusterScenario(SimSettings(prefill, decode, **more), costs, costs, trace))  # type: ignore[arg-type]
    sim.run()
    return sim


def check(sim: ClusterSim) -> None:
    """Every request ended or was refused, its times in order, and every page is given back."""
    for flight in sim.flights:
        if not flight.refused:
            assert flight.arrival <= flight.placed <= flight.first_token <= flight.last_token
            assert flight.written == flight.outputs
    for place in (*sim.prefills.values(), *sim.decodes.values()):
        place.node.pool.check()
        assert place.node.pool.snapshot_counts().leases == 0
        assert (place.sequences, place.pending_prompts, place.pending_tokens) == (0, 0, 0)


@pytest.mark.parametrize("policy", names())
def test_every_request_ends_and_every_page_comes_back(policy: str) -> None:
    sim = run(mooncake(60), 3, 2, policy=policy)
    check(sim)
    assert not any(f.refused for f in sim.flights)
    assert sim.placements["prefill"] > 0


def test_a_trace_is_not_searched_for_shared_prefixes_again_with_each_request() -> None:
    searches = []

    class Counted(Trace, frozen=True):
        @property
        def has_hashes(self) -> bool:
            searches.append(True)
            return False

    check(run(Counted("plain", tuple(TraceRequest(i / 10, 64, 4) for i in range(20))), 1, 1))
    assert len(searches) == 1


def test_a_crowd_that_waited_for_one_request_is_placed_when_it_ends() -> None:
    crowd = (TraceRequest(1.0 + i * 1e-4, 2500, 4) for i in range(400))
    check(run(Trace("crowd", (TraceRequest(0.0, SMALL.kv_tokens - 2000, 50), *crowd)), 0, 1, SMALL))


def test_where_writers_wait_a_prompt_comes_sooner_and_the_answer_beside_it_later() -> None:
    trace = Trace("two", (TraceRequest(0.0, 64, 40), TraceRequest(0.5, 4096, 2)))
    both, apart = (run(trace, 0, 1, decode_chunk=8192, writers_wait=wait) for wait in (False, True))
    check(apart)
    (writer, reader), (held_up, alone) = both.flights, apart.flights
    assert alone.first_token < reader.first_token
    assert held_up.last_token > writer.last_token


def test_the_real_scheduler_is_not_simulated_with_writers_that_wait() -> None:
    with pytest.raises(ConfigError, match="writers wait"):
        run(mooncake(10), 1, 1, stepwise=True, writers_wait=True)


def test_what_a_waiting_request_finds_cached_is_looked_for_again_when_it_has_changed() -> None:
    pool, blocks = PagePool(8), [bytes([i]) * 32 for i in range(3)]
    flight = Flight(0, TraceRequest(0.0, 48, 1), blocks)
    assert flight.held_in("p000", pool) == 0
    with pool.open(blocks, 3) as lease:
        lease.seal_run(0, blocks[:2])
        assert flight.held_in("p000", pool) == 2
        lease.seal(2, blocks[2])
    assert flight.held_in("p000", pool) == 3
    pool.open([], 8).close()  # everything is evicted
    assert flight.held_in("p000", pool) == 0
    assert flight.held_in("p000", PagePool(8)) == 0


def test_a_colocated_cluster_reads_and_writes_everywhere() -> None:
    sim = run(mooncake(60), 0, 4)
    check(sim)
    assert sim.placements["prefill"] == 0


def test_the_same_seed_gives_the_same_answer() -> None:
    trace = mooncake(60)
    first, again = ([f.last_token for f in run(trace, 3, 2, seed=5).flights] for _ in range(2))
    assert first == again


def test_compressed_time_is_held_against_the_real_schedulers_step_by_step() -> None:
    trace = mooncake(60)
    quick, slow = run(trace, 5, 3), run(trace, 5, 3, stepwise=True)
    check(slow)
    for of in (ttft, tpot):
        a, b = distribution([of(f) for f in quick.flights]), distribution([of(f) for f in slow.flights])
        assert a.mean == pytest.approx(b.mean, rel=0.03)
        assert a.p90 == pytest.approx(b.p90, rel=0.05)


def test_with_drafts_compressed_time_is_the_real_schedulers_and_answers_are_written_sooner() -> None:
    trace, drafted = mooncake(20), with_acceptance(LARGE, (0.8, 0.6, 0.4))
    plain, quick = run(trace, 3, 2), run(trace, 3, 2, drafted)
    slow = run(trace, 3, 2, drafted, stepwise=True)
    means = [distribution([tpot(f) for f in sim.flights]).mean for sim in (plain, quick, slow)]
    assert means[1] == pytest.approx(means[2], rel=0.03)
    assert means[1] < 0.7 * means[0]


@pytest.mark.thorough
def test_at_8p8d_blocks_of_a_trace_give_what_blocks_of_16_tokens_and_single_steps_give() -> None:
    """The cluster and trace of the simulator's speed: whoever plans with the quick one is told the same."""
    quick, slow = (run(mooncake(1e6), 8, 8, stepwise=stepwise) for stepwise in (False, True))
    assert (quick.block, slow.block) == (512, 16)
    for of in (ttft, tpot):
        a, b = distribution([of(f) for f in quick.flights]), distribution([of(f) for f in slow.flights])
        assert (a.mean, a.median) == (pytest.approx(b.mean, rel=0.03), pytest.approx(b.median, rel=0.03))
        assert a.p99 == pytest.approx(b.p99, rel=0.05)
    hits = [sum(f.cached for f in sim.flights) for sim in (quick, slow)]
    assert hits[0] == pytest.approx(hits[1], rel=0.03)


def test_ids_of_blocks_are_shared_where_the_trace_says_so_and_follow_one_another() -> None:
    ids = BlockIds(512, 16)
    first = ids.of(TraceRequest(0.0, 1030, 1, (7, 9, 4)))
    second = ids.of(TraceRequest(0.0, 1024, 1, (7, 8)))
    alone, again = ids.of(TraceRequest(0.0, 64, 1)), ids.of(TraceRequest(0.0, 64, 1))
    assert [len(found) for found in (first, second, alone)] == [64, 64, 4]
    assert first[:32] == second[:32] == list(range(32))
    assert first[0] is second[0]
    assert len({*first, *second, *alone, *again}) == 64 + 32 + 4 + 4
    own = [own_block(index, place) for index in range(5) for place in range(5)]
    assert len(set(own)) == 25
    assert max(own) < 0 <= min(first)


def test_what_one_adapter_has_computed_is_found_by_no_other() -> None:
    ids = BlockIds(512, 16)
    base, one, two = (ids.of(TraceRequest(0.0, 1024, 1, (7, 8), adapter)) for adapter in (0, 1, 2))
    assert ids.of(TraceRequest(0.0, 1024, 1, (7, 8), 1)) == one
    assert len({*base, *one, *two}) == 3 * 64


@pytest.mark.parametrize(
    ("prefill", "decode", "stepwise", "digest"),
    [(3, 2, True, "2bc54cde81deb3f7"), (0, 3, True, "acc46242c73842ad"), (3, 2, False, "cb0a64db21376f18")],
)
def test_times_are_the_same_to_the_bit_as_when_the_digests_were_taken(
    prefill: int, decode: int, stepwise: bool, digest: str
) -> None:
    """Whoever makes the simulator faster keeps them; whoever changes its model says so and renews them."""
    found = hashlib.sha256()
    for flight in run(mooncake(30), prefill, decode, stepwise=stepwise).flights:
        found.update(struct.pack("<ddd", flight.placed, flight.first_token, flight.last_token))
    assert found.hexdigest().startswith(digest)


def test_without_routing_choices_compressed_decode_is_exact() -> None:
    requests = tuple(TraceRequest(i * 0.3, 512 * (1 + i % 3), 40 + 13 * i) for i in range(12))
    trace = Trace("made", requests)
    quick, slow = run(trace, 1, 1), run(trace, 1, 1, stepwise=True)
    for a, b in zip(quick.flights, slow.flights, strict=True):
        assert a.last_token == pytest.approx(b.last_token, rel=1e-3)


def same_times(quick: ClusterSim, slow: ClusterSim) -> bool:
    """Returns whether both clusters gave every request the same times, and preempted as often."""
    for a, b in zip(quick.flights, slow.flights, strict=True):
        assert (a.placed, a.first_token, a.last_token) == pytest.approx(
            (b.placed, b.first_token, b.last_token), rel=1e-9
        )
        assert (a.refused, a.cached, a.decode) == (b.refused, b.cached, b.decode)
    preempted, really = (sum(d.node.preemptions for d in sim.decodes.values()) for sim in (quick, slow))
    assert preempted == really
    return really > 0


def drawn_trace(draw: random.Random, limit: int) -> Trace:
    """Up to 25 requests in blocks of 16 tokens, some with prefixes in common; each fits ``limit`` tokens."""
    roots, requests = [draw.randint(1, limit // 48) for _ in range(3)], []
    for i in range(draw.randint(2, 25)):
        root = draw.randrange(3)
        prompt = draw.randint(16 * roots[root], limit // 3)
        output = draw.randint(1, min(250, limit - prompt - 16))
        blocks = [root << 16 | j if j < roots[root] else (i + 3) << 16 | j for j in range(prompt // 16)]
        requests.append(TraceRequest(draw.random() * draw.choice((0.2, 1, 3)), prompt, output, tuple(blocks)))
    return Trace("made", tuple(sorted(requests, key=lambda r: r.arrival)), block_tokens=16)


def test_the_twin_gives_the_real_schedulers_times_whoever_comes_shares_or_is_preempted() -> None:
    preempting = 0
    for seed in range(20):
        draw = random.Random(seed)
        costs = msgspec.structs.replace(SMALL, kv_tokens=16 * draw.randint(20, 300))
        trace, prefill, decode = drawn_trace(draw, costs.kv_tokens), draw.randint(0, 2), draw.randint(1, 3)
        quick, slow = (run(trace, prefill, decode, costs, stepwise=stepwise) for stepwise in (False, True))
        preempting += same_times(quick, slow)
    assert preempting >= 5


@pytest.mark.parametrize(("prefill", "decode", "kv_tokens"), [(5, 3, 0), (0, 2, 120_000)])
def test_on_a_recorded_trace_in_blocks_of_16_the_twin_is_exact(prefill: int, decode: int, kv_tokens: int) -> None:
    trace = mooncake(20)
    ids = BlockIds(trace.block_tokens, 16)
    requests = tuple(
        TraceRequest(r.arrival, r.input_length, r.output_length, tuple(ids.of(r))) for r in trace.requests
    )
    costs = msgspec.structs.replace(LARGE, kv_tokens=kv_tokens or LARGE.kv_tokens)
    fine = Trace("fine", requests, block_tokens=16)
    same_times(*(run(fine, prefill, decode, costs, stepwise=stepwise) for stepwise in (False, True)))


@pytest.mark.parametrize("stepwise", [True, False])
def test_the_router_hears_of_an_end_when_the_step_is_over_and_not_before(stepwise: bool) -> None:
    """The second of two requests waits for the pages of the first."""
    costs = msgspec.structs.replace(SMALL, kv_tokens=480)
    requests = TraceRequest(0.0, 200, 100), TraceRequest(0.1, 300, 20)
    first, second = run(Trace("two", requests, block_tokens=16), 0, 1, costs, stepwise=stepwise).flights
    assert second.placed == pytest.approx(first.last_token, rel=1e-12)


def test_reuse_shortens_what_is_read() -> None:
    blocks = tuple(range(20))
    alike = Trace("alike", tuple(TraceRequest(i * 5.0, 10_240, 10, blocks) for i in range(6)))
    apart = Trace("apart", tuple(TraceRequest(i * 5.0, 10_240, 10) for i in range(6)))
    shared, alone = run(alike, 1, 1), run(apart, 1, 1)
    assert shared.flights[3].cached > 0
    assert ttft(shared.flights[3]) < ttft(alone.flights[3]) / 2


def test_a_request_that_never_fits_is_refused_and_the_others_are_served() -> None:
    costs = msgspec.structs.replace(SMALL, kv_tokens=4096)
    trace = Trace("t", (TraceRequest(0, 1000, 10), TraceRequest(1, 8000, 10), TraceRequest(2, 1000, 10)))
    sim = run(trace, 1, 1, costs)
    assert [f.refused for f in sim.flights] == [False, True, False]
    check(sim)


def test_a_cluster_that_cannot_be_formed_is_an_error() -> None:
    with pytest.raises(ConfigError, match="decode"):
        run(mooncake(10), 3, 0)


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 3000), st.integers(1, 300)), min_size=1, max_size=25),
    prefill=st.integers(0, 2),
    pages=st.integers(8, 40),
)
def test_a_tight_pool_loses_nobody(shapes: list[tuple[float, int, int]], prefill: int, pages: int) -> None:
    costs = msgspec.structs.replace(SMALL, kv_tokens=pages * 512)
    requests = sorted((TraceRequest(*shape) for shape in shapes), key=lambda r: r.arrival)
    sim = run(Trace("made", tuple(requests)), prefill, 1, costs)
    check(sim)
    flights: list[Flight] = sim.flights
    assert all(f.refused == (f.prompt + f.outputs > pages * 512) for f in flights)
