"""Tests prefix hints: bounded in time, of the same weights only, off the loop for long prompts."""

from __future__ import annotations

import asyncio

import msgspec

from baton.cluster.prefix_index import truncated
from baton.cluster.store.patience import CircuitBreaker
from baton.kv.layout import prefix
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import KvLayout, Sampling, WorkerInfo
from baton.router.dispatch import prefix_hints as hints
from baton.router.dispatch.prefix_hints import PrefixHints
from baton.router.policies import Candidate, ClusterSnapshot
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceSummary, RouterRequest
from tests.router.fake_workers import FakeIndex

LAYOUT = KvLayout("float32", (), 4096, "float32")


def candidate(worker_id: str, fingerprint: str = "f") -> Candidate:
    info = WorkerInfo(worker_id, "1", "decode", "a:1", "m", fingerprint, LAYOUT, 4096, 1000, (), 100)
    return Candidate(info, WorkerLoad())


SNAPSHOT = ClusterSnapshot((candidate("p0"), candidate("old", "g")), (candidate("d0"),))
TOKENS = tuple(range(100))
REQUEST = RouterRequest("r", "m", TOKENS, Sampling(), context=RequestContext(adapter_id="a", tenant_salt=b"s"))


async def test_the_index_is_asked_once_with_the_chain_of_the_workers_of_one_weights():
    index = FakeIndex({"p0": 2, "d0": 99})
    assert await PrefixHints(index).hits(SNAPSHOT, REQUEST, TOKENS, ChoiceSummary(100)) == {"p0": 2, "d0": 6}
    assert index.asked == [(["p0", "d0"], 6)]


async def test_adapter_and_tenant_are_at_the_root_of_the_chain():
    asked: list[bytes] = []

    class Index:
        async def longest(self, workers, hashes):
            asked.append(hashes)
            return {}

    await PrefixHints(Index()).hits(SNAPSHOT, REQUEST, TOKENS, ChoiceSummary(100))
    assert asked == [truncated(prefix.block_hashes(prefix.root("f", "float32", "a", b"s"), TOKENS))]


async def test_without_index_workers_or_a_full_block_nothing_is_asked():
    index = FakeIndex({"d0": 9})
    assert await PrefixHints(None).hits(SNAPSHOT, REQUEST, TOKENS, ChoiceSummary(100)) == {}
    assert await PrefixHints(index).hits(ClusterSnapshot((), ()), REQUEST, TOKENS, ChoiceSummary(100)) == {}
    assert await PrefixHints(index).hits(SNAPSHOT, REQUEST, TOKENS[:15], ChoiceSummary(100)) == {}
    assert index.asked == []


async def test_an_index_that_does_not_answer_costs_no_more_than_the_bound():
    class Stuck:
        async def longest(self, workers, hashes):
            await asyncio.sleep(60)

    hints = PrefixHints(Stuck(), CircuitBreaker(0.01))
    assert await asyncio.wait_for(hints.hits(SNAPSHOT, REQUEST, TOKENS, ChoiceSummary(100)), 20) == {}


async def test_an_index_that_was_late_is_not_asked_by_the_next_requests():
    asked: list[bytes] = []

    class Stuck:
        async def longest(self, workers, hashes):
            asked.append(hashes)
            await asyncio.Event().wait()

    hints = PrefixHints(Stuck(), CircuitBreaker(0.01, rest_s=3600))
    for _ in range(5):
        assert await hints.hits(SNAPSHOT, REQUEST, TOKENS, ChoiceSummary(100)) == {}
    assert len(asked) == 1


async def test_a_long_prompt_is_hashed_off_the_loop(monkeypatch):
    threads: list[object] = []

    async def to_thread(work, *args):
        threads.append(work)
        return work(*args)

    monkeypatch.setattr(hints.asyncio, "to_thread", to_thread)
    await PrefixHints(FakeIndex()).hits(
        SNAPSHOT, REQUEST, tuple(range(hints.HASH_OFF_LOOP_TOKENS)), ChoiceSummary(1)
    )
    assert threads == [prefix.block_hashes]


async def test_workers_of_another_page_size_are_asked_by_their_own_chain_and_counted_alike():
    wide = msgspec.structs.replace(LAYOUT, block_tokens=48)
    broken = msgspec.structs.replace(LAYOUT, block_tokens=0)
    infos = (candidate("p0").info, msgspec.structs.replace(candidate("d1").info, layout=wide))
    lost = msgspec.structs.replace(candidate("d2").info, layout=broken)
    snapshot = ClusterSnapshot((), tuple(Candidate(info, WorkerLoad()) for info in (lost, *infos)))
    index = FakeIndex({"p0": 9, "d1": 2, "d2": 4})
    found, summary = PrefixHints(index, keeps=True), ChoiceSummary(100)
    assert await found.hits(snapshot, REQUEST, TOKENS, summary) == {"p0": 6, "d1": 6}
    assert index.asked == [(["p0"], 6), (["d1"], 2)]
    chain = truncated(prefix.block_hashes(prefix.root("f", "float32", "a", b"s"), TOKENS))
    assert summary.chain == chain
    only_wide, other = ClusterSnapshot((), (Candidate(infos[1], WorkerLoad()),)), ChoiceSummary(100)
    assert await found.hits(only_wide, REQUEST, TOKENS, other) == {"d1": 6}
    assert other.chain == chain


async def test_a_prompt_s_chain_is_kept_where_it_is_wanted_and_not_of_a_replay():
    for keeps, tokens, kept in ((True, TOKENS, True), (True, (*TOKENS, 7), False), (False, TOKENS, False)):
        summary = ChoiceSummary(100)
        await PrefixHints(FakeIndex(), keeps=keeps).hits(SNAPSHOT, REQUEST, tokens, summary)
        assert bool(summary.chain) is kept
    summary = ChoiceSummary(100, chain=b"first")
    await PrefixHints(FakeIndex(), keeps=True).hits(SNAPSHOT, REQUEST, TOKENS, summary)
    assert summary.chain == b"first"
