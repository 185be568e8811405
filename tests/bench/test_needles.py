"""The checkpoint that finds needles finds them all where it sees all, and those in reach where it sees less."""

from pathlib import Path

import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from bench import needles
from bench.needles import coded, make, shares


def test_needles_are_found_wherever_attention_reaches_and_in_four_bits_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needles, "EACH", 1)
    make(tmp_path)
    whole = load_runner(EngineConfig(str(tmp_path), threads=1))
    assert shares(whole, 600) == shares(whole, 600, coded("int4")) == [1.0] * 5
    some = load_runner(EngineConfig(str(tmp_path), threads=1, kv_selection="sinks:64,window:128"))
    assert shares(some, 600) == [1.0, 0.0, 0.0, 0.0, 1.0]
    chosen = load_runner(EngineConfig(str(tmp_path), threads=1, kv_selection="snapkv:96,window:32"))
    assert shares(chosen, 600, twice=True) == [1.0] * 5
    assert sum(shares(chosen, 600)) < 3, "who isn't asked can't choose"
