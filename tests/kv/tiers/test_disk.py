"""The disk tier over the lives of processes: what was whole is found, what isn't ours is begun anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton.kv.tiers.disk import DiskTier
from baton.protos.errors import ConfigError
from tests.kv.sharers import LAYOUT, PAGE, chain, content

CHAIN = chain(40)
SIZE = 1 << 16


def loaded(tier: DiskTier, block: bytes) -> bytes | None:
    into = bytearray(PAGE)
    return bytes(into) if tier.slab.load(block, memoryview(into)) else None


def test_a_closed_tier_is_found_again_in_its_order(tmp_path):
    first = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    for block in CHAIN:
        first.slab.put(block, memoryview(content(block)))
    first.slab.touch(CHAIN[0])
    first.close()
    second = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    assert second.slab.hashes() == (*CHAIN[1:], CHAIN[0])
    assert [loaded(second, block) for block in CHAIN] == [content(block) for block in CHAIN]
    second.close()


WRITER = """
import sys
from pathlib import Path
from baton.kv.tiers.disk import DiskTier
from tests.kv.sharers import LAYOUT, chain, content
tier = DiskTier(Path(sys.argv[1]), 1 << 14, LAYOUT, "f")
for block in chain(100_000):
    tier.slab.put(block, memoryview(content(block)))
    print(block.hex(), flush=True)
"""


def test_kill_9_at_any_moment_leaves_every_slot_whole_or_absent(tmp_path):
    root = Path(__file__).parents[3]
    for life in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        writer = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(200 + 77 * life):
            writer.stdout.readline()
        writer.kill()
        writer.wait()
        writer.stdout.close()
        tier = DiskTier(tmp_path, 1 << 14, LAYOUT, "f")
        tier.slab.check()
        assert len(tier.slab) >= tier.slab.capacity - 1  # one may have been in the writing
        for block in tier.slab.hashes():
            assert loaded(tier, block) == content(block)
        assert tier.slab.damaged <= 1
        tier.close()


@pytest.mark.parametrize("change", ["layout", "weights", "size"])
def test_bytes_that_mean_something_else_are_begun_anew(tmp_path, change):
    first = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    first.slab.put(CHAIN[0], memoryview(content(CHAIN[0])))
    first.close()
    layout = msgspec.structs.replace(LAYOUT, dtype="int8") if change == "layout" else LAYOUT
    other = DiskTier(tmp_path, SIZE * 2 if change == "size" else SIZE, layout, "g" if change == "weights" else "f")
    assert len(other.slab) == 0
    other.close()


def test_files_of_another_program_are_not_trusted(tmp_path):
    (tmp_path / "index.kv").write_bytes(b"something else" * 10)
    (tmp_path / "pages.kv").write_bytes(b"x" * 100)
    tier = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    assert len(tier.slab) == 0
    tier.close()


def test_damaged_files_cost_only_what_was_damaged(tmp_path):
    first = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    for block in CHAIN:
        first.slab.put(block, memoryview(content(block)))
    first.close()
    with (tmp_path / "pages.kv").open("r+b") as pages:
        pages.seek(7 * PAGE + 100)
        pages.write(b"\xff\x00")
    tier = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    assert [loaded(tier, block) is None for block in CHAIN].count(True) == 1
    assert tier.slab.damaged == 1
    tier.close()


def test_two_workers_cannot_share_a_folder_and_a_useless_setting_is_named(tmp_path):
    first = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    with pytest.raises(ConfigError, match="another worker's") as raised:
        DiskTier(tmp_path, SIZE, LAYOUT, "f")
    assert raised.value.param == "worker.disk_tier_dir"
    first.close()
    with pytest.raises(ConfigError, match=r"raise worker\.disk_tier_bytes"):
        DiskTier(tmp_path, 100, LAYOUT, "f")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"set another worker\.disk_tier_dir"):
        DiskTier(tmp_path / "file", SIZE, LAYOUT, "f")
