"""The engine's benchmark of a start: a tiny model's, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.engine import start
from baton.kernels.abi import native

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300}  # fmt: skip


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_a_start_rounds_once_and_maps_the_cache_after_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(start.SIZES, "tiny", TINY)
    start.write_checkpoint(tmp_path, "tiny")
    assert start.start_seconds(str(tmp_path), "int4", str(tmp_path)) > 0
    cached = list((tmp_path / "weights").glob("*.baton"))
    written = cached[0].stat().st_mtime_ns
    assert start.start_seconds(str(tmp_path), "int4", str(tmp_path)) > 0
    assert len(cached) == 1
    assert cached[0].stat().st_mtime_ns == written


def test_a_row_says_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(start.SIZES, "tiny", TINY)
    took = iter((9.0, 1.5, 3.0, 1.0))
    monkeypatch.setattr(start, "_in_a_process", lambda folder, scheme: next(took))
    first, later = start.rows("tiny", "int8", 3)
    assert (first.value, first.reached) == (9.0, None)
    assert (later.value, later.reached) == (1.5, True)
