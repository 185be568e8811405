"""Tests what a batch costs its key: each line once, however often it is tried."""

from __future__ import annotations

import msgspec

from baton.cluster.batch_nouns import BatchJob, StoredFile
from baton.cluster.batch_store import BatchStore
from baton.cluster.config import RouterConfig
from baton.protos.errors import Overloaded
from baton.router.access.gate import AccessGate
from baton.router.api.batch import attempts
from baton.router.api.batch.lane import BatchLane
from baton.router.text.catalog import ModelCatalog
from tests.router.parts import generation_of

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
CHAT = "/v1/chat/completions"


class Counting(AccessGate):
    """Counts what is charged less what is given back."""

    requests = tokens = 0

    async def charge(self, key: object, model_id: str, requests: int, tokens: int, adapter: str = "") -> None:
        self.requests, self.tokens = self.requests + requests, self.tokens + tokens

    def refund(self, key: object, requests: int, tokens: int) -> None:
        self.requests, self.tokens = self.requests - requests, self.tokens - tokens


async def test_a_line_that_is_tried_again_is_charged_once(fake, model_dir, redis, monkeypatch) -> None:
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 0.01)
    opened, full, gate = fake.open, [Overloaded("full", retry_after_s=0.01)] * 3, Counting()

    def open_later(request):
        if full:
            raise full.pop()
        return opened(request)

    fake.open = open_later
    content = msgspec.json.encode({"custom_id": "r", "method": "POST", "url": CHAT, "body": BODY})
    store = BatchStore(redis, "t")
    await store.add_file(StoredFile("file-1", "acme", "x", "batch", len(content), 1), content)
    await store.put(BatchJob("batch_1", "acme", CHAT, "file-1", "24h", 1, 1, ""), is_open=True)
    service = generation_of(RouterConfig(), fake, ModelCatalog(fake.models, {"tiny": model_dir}), gate)
    await BatchLane(service, store, "one", lambda model_id: True).work("batch_1")
    assert ((await store.job("batch_1")).status, full) == ("completed", [])
    assert (gate.requests, gate.tokens) == (1, len(fake.requests[0].token_ids))
