"""`baton bench kv`, small: every row is there and measured, nothing is left running."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.bench.rows import Row, interval, median, paired, spread
from baton.console.main import app


@pytest.mark.thorough
def test_the_benchmark_measures_every_transport_beside_its_peer(tmp_path: Path) -> None:
    file, picture = tmp_path / "kv.json", tmp_path / "kv.png"
    arguments = ["bench", "kv", "--rounds", "1", "--mib", "16", "--page-kib", "512"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(file), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    for transport in ("shm", "tcp", "grpc"):
        assert rows[f"{transport} handoff"]["value"] > 0
        assert rows[f"{transport} handoff"]["ratio"] > 0
        for side in ("sender", "receiver"):
            cost, cpu = (rows[f"{transport}: checksums at the {side}{kind}"] for kind in ("", ", CPU time"))
            assert cost["low"] <= cost["value"] <= cost["high"]
            assert cost["target"]
            assert cpu["low"] <= cpu["value"] <= cpu["high"]
            assert not cpu["target"]
    by_auto = next(name.split(":")[0] for name in rows if name.startswith("auto ("))
    assert by_auto in {"auto (shm)", "auto (tcp)", "auto (grpc)"}
    for name in (by_auto, "shm", "tcp", "grpc"):
        for pace in ("45000 tok/s", "80% of what it carries"):
            assert rows[f"{name}: exposed after the last chunk at {pace}"]["value"] > 0
    assert rows[f"{by_auto}: exposed after the last chunk at 45000 tok/s"]["target"] == 1.2
    assert {"commit", "machine", "unit", "peer", "spread"} <= rows["memcpy"].keys()
    assert picture.stat().st_size > 1000


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    done = CliRunner().invoke(app, ["bench", "kv", "--mib", "17", "--page-kib", "2048"])
    assert done.exit_code != 0


def test_a_target_is_a_floor_or_a_ceiling() -> None:
    assert Row("a", 5, "GB/s", "memcpy", 0.7, target=0.6).reached is True
    assert Row("a", 5, "GB/s", "memcpy", 0.5, target=0.6).reached is False
    assert Row("a", 2, "ms", target=3, ceiling=True).reached is True
    assert Row("a", 2, "%", "the handoff", 0.2, target=0.12, ceiling=True).reached is False
    assert Row("a", 1, "ms").reached is None


def test_ratios_are_taken_within_a_round() -> None:
    assert paired([1.0, 10.0, 2.0], [2.0, 20.0, 4.0]) == 0.5
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert spread([1.0, 2.0, 3.0]) == 1.0


def test_the_interval_of_a_median_narrows_with_more_rounds_and_leaves_outliers_out() -> None:
    assert interval([5.0, 1.0, 3.0]) == (1.0, 5.0)
    values = [float(number) for number in range(30)] + [1e9]
    low, high = interval(values)
    assert 5 < low <= median(values) <= high < 25
    assert interval([2.0]) == (2.0, 2.0)
