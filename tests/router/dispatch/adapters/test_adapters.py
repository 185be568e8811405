"""Adapters through dispatch, against workers that speak gRPC: loaded on demand, kept, replaced, unloaded.

An answer depends on the adapter's content, so a request that met another content than it began on has wrong tokens.
"""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.cluster.adapters import AdapterEntry
from baton.cluster.metering import telemetry
from baton.protos.errors import (
    AdapterChanged,
    AdapterRefused,
    AdaptersFull,
    AdapterTaken,
    AdapterUnknown,
    NoWorker,
    QuotaExceeded,
    Unavailable,
    WeightsGone,
)
from baton.router.adapters import registry
from baton.router.adapters.registry import AdapterRegistry
from baton.router.dispatch import runner
from baton.router.dispatch.adapters import control as adapter_control
from baton.router.dispatch.adapters import keeper as adapter_keeper
from baton.router.dispatch.adapters import loads as adapter_loads
from baton.router.dispatch.adapters.control import AdapterBounds, require_path
from tests.router.fake_services import answer_of
from tests.router.fake_workers import PATIENT, cluster, collect, until

PROMPT = list(range(40))
ONE, TWO = "1" * 16, "2" * 16


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Loops of the control plane look more often than they need to."""
    monkeypatch.setattr(registry, "RETIRED_S", 0.05)
    monkeypatch.setattr(adapter_keeper, "LOOK_S", 0.01)
    monkeypatch.setattr(adapter_loads, "ROOM_S", 0.05)


def files(c, **digests: str) -> None:
    """Puts files with these digests on every worker's disk."""
    for worker in (*c.p, *c.d):
        worker.files |= digests


@asynccontextmanager
async def served(prefill: int = 1, decode: int = 2, **options):
    async with cluster(prefill, decode, prepare=lambda c: files(c, sql=ONE, other=TWO), **options) as c:
        yield c


async def add(c, name: str = "sql", path: str = "", in_place: bool = False, **fields) -> AdapterEntry:
    return await c.core.adapters.add(AdapterEntry(name, "m", path or name, **fields), in_place)


async def ask(c, adapter: str, count: int = 8) -> list[int]:
    [stream] = c.open(PROMPT, count, adapter_id=adapter)
    return await collect(stream)


async def test_an_added_adapter_is_on_every_worker_and_its_answers_are_its_own():
    async with served() as c:
        entry = await add(c)
        assert entry.adapter_id == f"sql@{ONE}"
        assert c.core.adapters.holders(entry) == ["d0", "d1", "p0"]
        assert await ask(c, entry.adapter_id) == answer_of(PROMPT, 8, adapter=entry.adapter_id)
        assert await ask(c, "") == answer_of(PROMPT, 8)
        assert [len(w.loads) for w in (*c.p, *c.d)] == [1, 1, 1]
        await c.idle()


async def test_a_worker_that_lacks_it_loads_it_once_for_all_requests_that_wait():
    async with served(decode=1) as c:
        entry = await add(c)
        for worker in (*c.p, *c.d):
            worker.adapters.clear()  # as if it had been evicted, unannounced
            worker.hold_loads.clear()
        asked = [asyncio.create_task(ask(c, entry.adapter_id)) for _ in range(5)]
        await until(lambda: len(c.d[0].loads) == 2)
        for worker in (*c.p, *c.d):
            worker.hold_loads.set()
        right = answer_of(PROMPT, 8, adapter=entry.adapter_id)
        assert await asyncio.gather(*asked) == [right] * 5
        assert (len(c.d[0].loads), len(c.p[0].loads)) == (2, 2)
        await c.idle()


async def test_the_spans_of_a_request_and_of_its_load_name_the_adapter(monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")

    def span(name, traceparent="", attributes=None):
        context = telemetry._context(traceparent) if traceparent else None
        return tracer.start_as_current_span(name, context=context, attributes=attributes)

    monkeypatch.setattr(runner, "span", span)
    async with served(decode=1) as c:
        entry = await add(c)
        for adapter in ("", entry.adapter_id):
            await ask(c, adapter)
        for worker in (*c.p, *c.d):
            worker.adapters.clear()
        await ask(c, entry.adapter_id)
        await c.idle()
    spans = exporter.get_finished_spans()
    routes = [s.attributes.get("baton.adapter") for s in spans if s.name == "route"]
    assert routes == [None, entry.adapter_id, entry.adapter_id]
    loads = [s for s in spans if s.name == "adapter"]
    assert {s.attributes["baton.adapter"] for s in loads} == {entry.adapter_id}
    assert loads[0].parent.span_id == [s for s in spans if s.name == "route"][-1].context.span_id


async def test_a_refusal_of_a_request_sent_before_a_load_does_not_undo_it():
    async with served(prefill=0, decode=1) as c:
        entry = await add(c)
        [link] = c.core.view._links
        before = link.loads
        await c.core.adapters.add(entry, in_place=True)  # loaded again, while the refusal is on its way
        link.lacks(entry.adapter_id, before)
        assert link.holds(entry.adapter_id)
        link.lacks(entry.adapter_id, link.loads)
        assert not link.holds(entry.adapter_id)


async def test_requests_go_where_their_adapter_is():
    async with served(prefill=0, decode=3) as c:
        entry = await add(c)
        for d in c.d[1:]:
            d.adapters.clear()
            d.announce(c.roster)
        c.d[0].announce(c.roster)
        for link in c.core.view._links:
            link._loaded.clear()
        await until(lambda: c.core.adapters.holders(entry) == ["d0"])
        c.view.changed()
        for _ in range(4):
            await ask(c, entry.adapter_id)
        assert [len(d.admits) for d in c.d] == [4, 0, 0]


async def test_a_cancelled_request_leaves_the_load_to_the_others():
    async with served(prefill=0, decode=1) as c:
        entry = await add(c)
        c.d[0].adapters.clear()
        c.d[0].hold_loads.clear()
        [first] = c.open(PROMPT, 8, adapter_id=entry.adapter_id, request_id="r1")
        second = asyncio.create_task(ask(c, entry.adapter_id))
        await until(lambda: len(c.d[0].loads) == 2)
        first.cancel("client_gone")
        c.d[0].hold_loads.set()
        assert await second == answer_of(PROMPT, 8, adapter=entry.adapter_id)
        assert len(c.d[0].loads) == 2
        await c.idle()


async def test_a_replaced_adapter_affects_new_requests_and_running_ones_end_on_theirs():
    async with served(decode=1) as c:
        old = await add(c)
        c.d[0].hold_tokens.clear()
        [running] = c.open(PROMPT, 8, adapter_id=old.adapter_id)
        await until(lambda: c.d[0].leases)
        files(c, sql=TWO)
        new = await add(c, in_place=True)
        assert new.adapter_id == f"sql@{TWO}"
        assert c.core.adapters.registry.served()["sql"] == new
        await asyncio.sleep(0.1)  # several looks of the keeper: it must not have unloaded what is in use
        assert old.adapter_id in c.d[0].adapters
        c.d[0].hold_tokens.set()
        assert await collect(running) == answer_of(PROMPT, 8, adapter=old.adapter_id)
        assert await ask(c, new.adapter_id) == answer_of(PROMPT, 8, adapter=new.adapter_id)
        await until(lambda: list(c.d[0].adapters) == [new.adapter_id], what=lambda: c.d[0].adapters)
        await c.idle()


async def test_a_killed_workers_request_goes_on_with_its_content_on_another():
    async with served() as c:
        entry = await add(c)
        for d in c.d:
            d.stall_after(4)
        [stream] = c.open(PROMPT, 20, adapter_id=entry.adapter_id)
        await until(lambda: len(stream.emitted) == 4)
        await c.core.adapters.remove("sql")
        victim, other = c.d if c.d[0].leases else c.d[::-1]
        await victim.die()
        other.hold_tokens.set()
        assert await collect(stream) == answer_of(PROMPT, 20, adapter=entry.adapter_id)
        await c.idle()


async def test_what_nobody_can_read_any_more_is_said_and_not_answered_by_another_content():
    settings = msgspec.structs.replace(PATIENT, worker_wait_s=0.3)  # no worker comes that has the old content
    async with served(prefill=0, decode=1, settings=settings) as c:
        old = await add(c)
        c.d[0].hold_tokens.clear()
        [holding] = c.open(PROMPT, 4, adapter_id=old.adapter_id, request_id="r0")
        await until(lambda: c.d[0].leases)
        files(c, sql=TWO)
        await add(c, in_place=True)
        c.d[0].adapters.pop(old.adapter_id)
        [stream] = c.open(PROMPT, 8, adapter_id=old.adapter_id)
        with pytest.raises(WeightsGone, match="unloaded or replaced"):
            await collect(stream)
        c.d[0].hold_tokens.set()
        await collect(holding)


async def test_a_worker_that_cannot_read_it_is_left_to_others():
    async with served(prefill=0) as c:
        entry = await add(c)
        lacking = c.d[0]
        lacking.adapters.clear()
        lacking.files.clear()
        for link in c.core.view._links:
            link.lacks(entry.adapter_id, link.loads) if link.info.worker_id == "d0" else None
        for _ in range(4):
            assert await ask(c, entry.adapter_id) == answer_of(PROMPT, 8, adapter=entry.adapter_id)
        assert len(lacking.admits) == 0


async def test_a_full_worker_refuses_by_name_and_holds_nobody_else_up():
    async with served(prefill=0, decode=1) as c:
        entry = await add(c)
        c.d[0].adapters.clear()
        c.d[0].load_refusals = [AdaptersFull("all of them are in use", retry_after_s=1.0) for _ in range(99)]
        [stream] = c.open(PROMPT, 8, adapter_id=entry.adapter_id)
        assert await ask(c, "") == answer_of(PROMPT, 8)
        with pytest.raises(AdaptersFull):
            await collect(stream)
        c.d[0].load_refusals.clear()
        assert await ask(c, entry.adapter_id) == answer_of(PROMPT, 8, adapter=entry.adapter_id)


async def test_a_removed_name_is_unknown_and_its_memory_is_given_back():
    async with served() as c:
        entry = await add(c)
        await c.core.adapters.remove("sql")
        with pytest.raises(AdapterUnknown, match="no adapter 'sql'"):
            await c.core.adapters.remove("sql")
        await until(lambda: not any(w.adapters for w in (*c.p, *c.d)))
        await until(lambda: c.core.adapters.registry.of_id(entry.adapter_id) is None)
        assert (await add(c)).adapter_id == entry.adapter_id


async def test_what_is_refused_leaves_nothing_behind():
    async with served(prefill=1, decode=1) as c:
        c.p[0].load_refusals = [AdapterRefused("rank 512 is over 64", "r")]
        with pytest.raises(AdapterRefused, match="rank 512"):
            await add(c)
        assert c.core.adapters.registry.served() == {}
        await until(lambda: not c.d[0].adapters)
        c.d[0].files["sql"] = TWO
        with pytest.raises(AdapterChanged, match="d0 2222222222222222, p0 1111111111111111"):
            await add(c)
        await until(lambda: not c.d[0].adapters and not c.p[0].adapters)


async def test_what_is_refused_is_taken_off_workers_that_announced_it_meanwhile():
    async with served(prefill=1, decode=1) as c:
        c.p[0].load_refusals = [AdapterRefused("rank 512 is over 64", "r")]
        c.p[0].hold_loads.clear()
        adding = asyncio.create_task(add(c))
        await until(lambda: c.d[0].adapters)
        c.d[0].announce(c.roster)
        await until(lambda: any(link.info.adapters for link in c.core.view._links))
        c.p[0].hold_loads.set()
        with pytest.raises(AdapterRefused, match="rank 512"):
            await adding
        await until(lambda: not c.d[0].adapters)


async def test_a_worker_that_is_away_does_not_hinder_an_addition():
    async with served(decode=2) as c:
        c.d[1].load_refusals = [Unavailable("later")]
        entry = await add(c)
        assert c.core.adapters.holders(entry) == ["d0", "p0"]


@pytest.mark.parametrize(
    ("entry", "error", "what"),
    [
        (AdapterEntry("sql", "m", "other"), AdapterTaken, "served already"),
        (AdapterEntry("m", "m", "other"), AdapterTaken, "a model's name"),
        (AdapterEntry("a b", "m", "other"), AdapterRefused, "lora_name"),
        (AdapterEntry("x", "m", "../other"), AdapterRefused, "relative to adapters.root"),
        (AdapterEntry("x", "m", "none"), AdapterRefused, "no adapter at none"),
        (AdapterEntry("x", "n", "other"), NoWorker, "no worker of 'n'"),
        (AdapterEntry("x", "m", "other"), AdaptersFull, "max_served"),
        (AdapterEntry("sql", "m", "other", tenant="t"), AdapterTaken, "served already"),
    ],
)
async def test_bad_additions_are_refused_by_name(entry, error, what):
    async with served(prefill=0, decode=1) as c:
        await add(c)
        c.core.adapters._bounds = AdapterBounds(served=1 if what == "max_served" else 9)
        with pytest.raises(error) as caught:
            await c.core.adapters.add(entry, False)
        assert what in (caught.value.param, caught.value.message) or what in caught.value.message
        assert list(c.core.adapters.registry.served()) == ["sql"]


async def test_a_tenants_quota_counts_its_own_adapters_alone():
    async with served(prefill=0, decode=1) as c:
        c.core.adapters._bounds = AdapterBounds(per_tenant=1)
        await add(c, tenant="t")
        with pytest.raises(QuotaExceeded, match="tenant 't' has 1"):
            await add(c, "other", tenant="t")
        await add(c, "other", tenant="u")
        await add(c, "sql", in_place=True, tenant="t")


async def test_pinned_adapters_come_to_new_workers_by_themselves():
    async with served(prefill=0, decode=1) as c:
        entry = await add(c, pinned=True)
        c.d[0].adapters.clear()
        c.d[0].announce(c.roster)
        for link in c.core.view._links:
            link.lacks(entry.adapter_id, link.loads)
        await until(lambda: entry.adapter_id in c.d[0].adapters)
        assert c.d[0].loads[-1].pinned


async def test_a_worker_that_loads_slowly_holds_up_no_other_and_no_later_look():
    async with served(prefill=0, decode=2) as c:
        entry, other = await add(c, pinned=True), await add(c, "other")
        slow, quick = (c.core.links.decode(d.info.worker_id) for d in c.d)
        c.d[0].hold_loads.clear()
        for _ in range(2):
            for link in (slow, quick):
                link.lacks(entry.adapter_id, link.loads)
            await until(lambda: quick.holds(entry.adapter_id))
        await c.core.adapters.remove("other")
        await until(lambda: not quick.holds(other.adapter_id))
        assert not slow.holds(entry.adapter_id)
        c.d[0].hold_loads.set()
        await until(lambda: slow.holds(entry.adapter_id))


async def test_the_contents_of_configured_adapters_are_learned_from_workers():
    known = AdapterRegistry([AdapterEntry("sql", "m", "/srv/sql")])
    async with served(prefill=0, decode=2, adapters=known) as c:
        assert known.served()["sql"].adapter_id == ""
        for d in c.d:
            d.adapters[f"sql@{ONE}"] = "/srv/sql"
            d.announce(c.roster)
        await until(lambda: known.served()["sql"].adapter_id == f"sql@{ONE}")
        assert await ask(c, f"sql@{ONE}") == answer_of(PROMPT, 8, adapter=f"sql@{ONE}")
        assert not c.d[0].loads


@pytest.mark.parametrize("path", ["", "/etc", "a/../b", "..", "a//b", "./a", "a/", "a\\b", "a\0b", "x" * 600])
def test_only_plain_paths_beneath_the_root_are_taken(path):
    with pytest.raises(AdapterRefused, match=r"relative to adapters\.root"):
        require_path(path)


def test_a_folder_in_a_folder_is_a_plain_path():
    require_path("team-a/sql v2")
    assert adapter_control.MAX_PATH >= 256
