"""Tests how much memory is left, as the machine and a container's limit say."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.process.memory import available_bytes

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"


@pytest.mark.parametrize(
    ("limit", "used", "reclaimable", "left"),
    [
        ("max", 0, 0, 600 << 10),
        (str(400 << 10), 100 << 10, 50 << 10, 350 << 10),
        (str(900 << 10), 0, 0, 600 << 10),
        (str(100 << 10), 150 << 10, 0, 0),
    ],
)
def test_what_is_left_is_the_least_of_machine_and_container(
    tmp_path: Path, limit: str, used: int, reclaimable: int, left: int
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == left


def test_without_a_control_group_the_machine_alone_counts(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert available_bytes(tmp_path / "meminfo", tmp_path / "none") == 600 << 10


def test_this_machine_has_some() -> None:
    assert available_bytes() > 1 << 20
