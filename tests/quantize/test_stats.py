"""Statistics of inputs over a text: what they keep, and that samples' memory is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.process.heap import return_freed_memory
from baton.quantize.layers import States
from baton.quantize.stats import KEPT, ActivationStats

STATUS = Path("/proc/self/status")
SAMPLES, TOKENS, WIDTH = 48, 1024, 512
SAMPLE_BYTES = 4 * TOKENS * WIDTH


def _resident() -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")
def test_many_samples_take_the_memory_of_few(tmp_path: Path) -> None:
    states = States(tmp_path, SAMPLES, TOKENS)
    for sample in range(SAMPLES):
        states.write(sample, "x", torch.rand(TOKENS, WIDTH))
    states.advance({"x"})
    stats = ActivationStats(WIDTH, SAMPLES * TOKENS)
    stats.add(states.read(0, {"x"})["x"])
    return_freed_memory()
    before = _resident()
    for sample in range(1, SAMPLES):
        stats.add(states.read(sample, {"x"})["x"])
    assert _resident() - before < SAMPLES * SAMPLE_BYTES // 4


def test_rows_are_kept_evenly_also_when_more_come_than_were_expected() -> None:
    rows = torch.arange(4 * KEPT).float()[:, None].repeat(1, 3)
    stats = ActivationStats(3, KEPT)
    for part in rows.split(100):
        stats.add(part)
    assert torch.equal(stats.rows, rows)
    assert torch.equal(stats.divided(torch.full((3,), 2.0)).rows, rows / 2)
    few = ActivationStats(3, len(rows))
    for part in rows.split(100):
        few.add(part)
    assert torch.equal(few.rows, rows[::4])
