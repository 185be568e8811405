"""The picture of the engine: every row that has a ceiling is in it, and the same rows give the same file."""

from __future__ import annotations

import json
from pathlib import Path

from bench.engine_picture import GROUPS, bars, draw

ROWS = Path(__file__).parents[2] / "bench" / "results" / "engine.json"


def test_every_row_beside_a_ceiling_is_drawn_and_the_file_is_reproducible(tmp_path: Path) -> None:
    rows = json.loads(ROWS.read_text())
    shown = bars(rows)
    assert {bar.group for bar in shown} == set(GROUPS)
    assert len(shown) == sum(bool(row["ratio"]) for row in rows if row["name"].split(",")[0] in GROUPS)
    assert any(bar.target for bar in shown)
    written = []
    for name in ("a.svg", "b.svg"):
        draw(shown, rows[0], str(tmp_path / name))
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
