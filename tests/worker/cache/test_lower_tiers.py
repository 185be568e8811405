"""Pages in the tier that workers share, as their codec has them on the wire."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.kv.layout.bridge import wire_bytes, with_codec
from baton.kv.layout.page import layout_for
from baton.kv.tiers.blobs import HEAD_BYTES, meaning_of
from baton.kv.tiers.folder import FolderStore
from baton.kv.tiers.shared import SharedTier
from baton.worker.cache.lower_tiers import page_coder

LAYOUT = layout_for("float32", 3, 2, 16)


@pytest.mark.parametrize("codec", ["none", "int8", "int4"])
async def test_a_shared_block_takes_as_many_bytes_as_on_the_wire_and_comes_back_nearly_whole(
    tmp_path: Path, codec: str
) -> None:
    layout = with_codec(LAYOUT, codec)
    meaning, coder = meaning_of(layout, "f"), page_coder(layout)
    writer, reader = (
        SharedTier(FolderStore(tmp_path), meaning, layout.page_bytes, 0, lambda: 0.0, coder) for _ in range(2)
    )
    numbers = np.random.default_rng(2).normal(size=layout.page_bytes // 4).astype(np.float32)
    block, page = bytes(32), bytearray(layout.page_bytes)
    await writer.offer([block], [memoryview(numbers.tobytes())])
    await writer.settled()
    (stored,) = FolderStore(tmp_path).entries()
    assert stored.size == HEAD_BYTES + wire_bytes(layout)
    assert [count async for count in reader.load([block], [memoryview(page)])] == [1]
    assert np.abs(np.frombuffer(page, np.float32) - numbers).max() <= {"none": 0, "int8": 0.02, "int4": 0.2}[codec]
    for tier in (writer, reader):
        await tier.close()
