"""The speed of keeping less KV, small: each way answers, and four bits take a third of the bytes."""

from baton.kv.layout.coding import NAMES
from bench.kv_fidelities import codecs


def test_each_codec_is_timed_both_ways():
    rows = list(codecs(1))
    assert [row.name.split(":")[0] for row in rows] == [name for name in NAMES for _ in range(2)]
    assert [row.peer for row in rows[-2:]] == ["0.32 of bfloat16's bytes"] * 2
    assert all(row.value > 0 for row in rows)
