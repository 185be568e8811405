"""Files and lists of batches with the unmodified client and a real Redis: refused, paged, bounded, forgotten."""

from __future__ import annotations

import asyncio

import openai
import pytest

from baton.cluster.batch_nouns import BatchJob, ListPage, StoredFile
from baton.cluster.batch_store import KEPT_S, BatchStore
from baton.cluster.membership import connect
from baton.protos.errors import InvalidRequest, Unavailable
from tests.router.api.batch.conftest import CHAT


async def test_bad_uploads_and_pages_are_refused_by_name(bench, router) -> None:
    post = bench.http.post
    for response, param in (
        (await post("/v1/files", data={"purpose": "vision"}, files={"file": b"x"}), "purpose"),
        (await post("/v1/files", data={"purpose": "batch"}), "file"),
        (await post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}), "file"),
        (await bench.http.get("/v1/batches?limit=0"), "limit"),
        (await post("/v1/batches", json={"input_file_id": "x", "endpoint": "/v1/edits"}), "endpoint"),
    ):
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert (await bench.http.get("/v1/batches/none")).status_code == 404
    assert (await router.http.get("/v1/files")).status_code == 503


async def test_a_store_out_of_reach_is_an_error_that_says_so() -> None:
    store = BatchStore(connect("unix:///nowhere/redis.sock"), "t")
    with pytest.raises(Unavailable, match="can't be reached"):
        await store.jobs(ListPage())


async def test_what_was_kept_long_enough_is_forgotten_everywhere(redis) -> None:
    store = BatchStore(redis, "t", kept_s=1)
    await store.add_file(StoredFile("file-1", "", "x", "batch", 1, 1), b"x")
    job = BatchJob("batch_1", "", "/v1/completions", "file-1", "24h", 1, 1)
    await store.put(job, is_open=True)
    async with asyncio.timeout(60):
        while await redis.keys("*"):
            await asyncio.sleep(0.05)
    assert await store.file("file-1") is None
    assert await store.job("batch_1") is None
    assert (await store.files(ListPage()))[0] == (await store.jobs(ListPage()))[0] == await store.open_jobs() == []
    assert await redis.keys("*") == []


async def test_lists_are_paged_by_tenant_and_a_page_says_where_it_ends(redis) -> None:
    store = BatchStore(redis, "t")
    for number in range(7):
        await store.add_file(StoredFile(f"file-{number}", f"tenant-{number % 2}", "x", "batch", 1, number), b"x")
        await store.put(
            BatchJob(f"batch-{number}", f"tenant-{number % 2}", "/", "f", "24h", number, 1), is_open=True
        )
    claim = await store.claim("batch-6", "one", 10)
    await store.answer(claim, 0, b"{}", True)
    files, more = await store.files(ListPage(None, limit=3))
    assert ([f.id for f in files], more) == (["file-6", "file-5", "file-4"], True)
    files, more = await store.files(ListPage("tenant-0", "file-4", 3))
    assert ([f.id for f in files], more) == (["file-2", "file-0"], False)
    await store.drop_file(files[0])
    assert [f.id for f in (await store.files(ListPage("tenant-0")))[0]] == ["file-6", "file-4", "file-0"]
    jobs, more = await store.jobs(ListPage("tenant-0", limit=2))
    assert ([(j.id, j.completed) for j in jobs], more) == ([("batch-6", 1), ("batch-4", 0)], True)
    with pytest.raises(InvalidRequest, match="not in the list"):
        await store.jobs(ListPage("tenant-1", "batch-6"))


async def test_a_client_pages_through_all_its_files(bench) -> None:
    made = [await bench.openai.files.create(file=("a", b"x"), purpose="batch") for _ in range(5)]
    assert {f.id async for f in bench.openai.files.list(limit=2)} == {f.id for f in made}


async def test_a_list_of_files_is_of_the_purpose_and_in_the_order_that_are_asked_for(bench) -> None:
    store, mine = bench.store, list[str]()
    for number in range(6):
        purpose = ("batch", "batch_output")[number % 2]
        await store.add_file(StoredFile(f"file-{number}", "", "x", purpose, 1, number), b"x")
        mine += [f"file-{number}"] * (number % 2)
    listed = bench.openai.files.list
    assert [f.id async for f in listed(purpose="batch_output", limit=2)] == mine[::-1]
    assert [f.id async for f in listed(purpose="batch_output", limit=1, order="asc")] == mine
    assert (await listed(purpose="batch_output", limit=3)).has_more is False
    assert [f.id async for f in listed(limit=4, order="asc")] == [f"file-{number}" for number in range(6)]
    assert [f.id async for f in listed(purpose="fine-tune")] == []
    assert (await bench.http.get("/v1/files?order=up")).json()["error"]["param"] == "order"


async def test_the_stores_own_names_are_nobodys_ids(bench) -> None:
    batch = await bench.submit(CHAT)
    await bench.openai.batches.cancel(batch.id)
    for name in ("all", "list:all", "list:of:", "list:open", f"{batch.id}:cancel", f"{batch.id}:owner"):
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert (await bench.http.get(path)).status_code == 404, path
        body = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await bench.http.post("/v1/batches", json=body)).status_code in (400, 404)


async def test_a_tenants_files_are_bounded_and_what_is_deleted_or_over_makes_room(bench) -> None:
    create = bench.openai.files.create
    kept = await create(file=("a.jsonl", b"x" * 60_000), purpose="batch")
    with pytest.raises(openai.RateLimitError, match=r"60000 bytes of files are kept.*max_stored_bytes"):
        await create(file=("b.jsonl", b"x" * 40_001), purpose="batch")
    await bench.openai.files.delete(kept.id)
    assert (await create(file=("b.jsonl", b"x" * 60_000), purpose="batch")).bytes == 60_000
    assert await bench.store.add_file(StoredFile("file-a", "a", "x", "batch", 9, 1), b"x" * 9, 10) is None
    assert await bench.store.add_file(StoredFile("file-b", "a", "x", "batch", 2, 2), b"xx", 10) == 9
    later = StoredFile("file-c", "a", "x", "batch", 2, 2 + KEPT_S)
    assert await bench.store.add_file(later, b"xx", 10) is None, "the first file's time is over"
    assert await bench.store.file("file-b") is None
