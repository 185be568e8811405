"""Tests that the lane leaves the event loop to other clients."""

from __future__ import annotations

import threading

import msgspec

from baton.cluster.batch_nouns import BatchJob, StoredFile
from baton.cluster.batch_store import BatchStore
from baton.cluster.config import RouterConfig
from baton.router.access.gate import AccessGate
from baton.router.api.batch import lane as batch_lane
from baton.router.api.batch.lane import BatchLane
from baton.router.api.large import INLINE_BYTES
from baton.router.text.catalog import ModelCatalog
from tests.router.parts import generation_of

CHAT = "/v1/chat/completions"


async def test_a_large_input_file_is_parsed_in_a_thread(fake, model_dir, redis, monkeypatch) -> None:
    threads, read_lines = list[threading.Thread](), batch_lane.read_lines

    def noted(content: bytes, endpoint: str):
        threads.append(threading.current_thread())
        return read_lines(content, endpoint)

    monkeypatch.setattr(batch_lane, "read_lines", noted)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    content = msgspec.json.encode({"custom_id": "r", "method": "POST", "url": CHAT, "body": body})
    content += b"\n" * INLINE_BYTES
    store = BatchStore(redis, "t")
    await store.add_file(StoredFile("file-1", "acme", "x", "batch", len(content), 1), content)
    await store.put(BatchJob("batch_1", "acme", CHAT, "file-1", "24h", 1, 1, ""), is_open=True)
    service = generation_of(RouterConfig(), fake, ModelCatalog(fake.models, {"tiny": model_dir}), AccessGate())
    await BatchLane(service, store, "one", lambda model_id: True).work("batch_1")
    assert (await store.job("batch_1")).status == "completed"
    assert threads
    assert threading.main_thread() not in threads
