"""Tests what a sender leaves out where tokens see sinks and a window, for receivers with pages of any size."""

from __future__ import annotations

import pytest

from baton.kv.layout.page import in_pages_of, layout_for, sliding_window, sunk_blocks
from baton.kv.layout.repaging import Repaging
from baton.kv.layout.selection import marked, parsed
from baton.kv.pages.pool import PagePool
from baton.kv.pages.window import first_seen
from baton.prefill_worker.io.service import PrefillCall, _not_seen
from baton.protos.channel import ShipBlock
from baton.protos.nouns import EngineRequest, Sampling

LAYOUT = layout_for("float32", 1, 1, 4, fidelity=marked("float32", parsed("sinks:32,window:64")))


def call_of(tokens: int) -> PrefillCall:
    request = EngineRequest("r", (1,) * tokens, tokens, Sampling(), 0)
    return PrefillCall(request, "", "", b"l" * 16, 1, 0)


@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (16, 48), (48, 16), (32, 48)])
@pytest.mark.parametrize("tokens", [20, 100, 300, 337])
def test_what_is_shipped_is_what_the_receivers_lease_lacks(ours: int, theirs: int, tokens: int) -> None:
    sender, receiver = in_pages_of(LAYOUT, ours), in_pages_of(LAYOUT, theirs)
    unseen = _not_seen(call_of(tokens), receiver)
    paging = Repaging(sender, receiver, tokens, 0, unseen)
    leading, had = paging.wanted()
    shipped = [block for block in range(-(-tokens // ours)) if block >= leading and block not in had]
    came = {piece.index for n in shipped for piece in paging.take(ShipBlock(n, n, b"", ours))}
    window, sunk = sliding_window(receiver), sunk_blocks(receiver)
    pool, blocks = PagePool(64, theirs), -(-tokens // theirs)
    lease = pool.open_behind([], first_seen(tokens, window, theirs), blocks, 0, 0, window, sunk)
    assert came >= set(lease.lacking)
    assert not came & set(range(*lease.gap))
