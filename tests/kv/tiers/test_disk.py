"""The disk tier over the lives of processes: what was whole is found, what isn't ours is begun anew."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton.kv.tiers import disk
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


def test_a_slot_takes_the_room_of_one_that_has_left_and_of_none_that_runs(tmp_path, monkeypatch):
    def allocate(file: int, offset: int, size: int) -> None:
        others = sum(
            path.stat().st_size for path in tmp_path.glob("*/*") if not path.samefile(f"/proc/self/fd/{file}")
        )
        if others + offset + size > 2.5 * SIZE:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, offset, size)

    real = os.posix_fallocate
    monkeypatch.setattr(disk.os, "posix_fallocate", allocate)
    gone, runs = (DiskTier(tmp_path / name, SIZE, LAYOUT, "f") for name in ("decode-0", "decode-1"))
    for tier in (gone, runs):
        tier.slab.put(CHAIN[0], memoryview(content(CHAIN[0])))
    gone.close()
    moved = DiskTier(tmp_path / "decode-2", SIZE, LAYOUT, "f")
    moved.slab.put(CHAIN[1], memoryview(content(CHAIN[1])))
    assert loaded(moved, CHAIN[1]) == content(CHAIN[1])
    assert loaded(runs, CHAIN[0]) == content(CHAIN[0])
    with pytest.raises(ConfigError, match="No space left"):
        DiskTier(tmp_path / "decode-0", SIZE, LAYOUT, "f")
    moved.close()
    again = DiskTier(tmp_path / "decode-0", SIZE, LAYOUT, "f")
    assert len(again.slab) == 0
    for tier in (again, runs):
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


def broken(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_block_that_cannot_be_read_is_dropped_and_the_others_stay(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    for block in CHAIN:
        tier.slab.put(block, memoryview(content(block)))
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "preadv", broken)
        assert loaded(tier, CHAIN[3]) is None
    assert (CHAIN[3] in tier.slab, tier.slab.failed, tier.slab.damaged) == (False, 1, 0)
    tier.slab.check()
    assert [loaded(tier, block) is None for block in CHAIN].count(True) == 1
    tier.slab.put(CHAIN[3], memoryview(content(CHAIN[3])))
    assert loaded(tier, CHAIN[3]) == content(CHAIN[3])
    tier.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_block_that_cannot_be_written_is_not_kept_and_the_next_one_is(tmp_path, monkeypatch, error):
    def full(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    tier = DiskTier(tmp_path, 4096 + 3 * (PAGE + 64), LAYOUT, "f")
    for block in CHAIN[:3]:
        tier.slab.put(block, memoryview(content(block)))
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "pwrite", full)
        assert tier.slab.put(CHAIN[9], memoryview(content(CHAIN[9]))) == CHAIN[0]
        tier.slab.touch(CHAIN[2])
        tier.slab.check()
    assert CHAIN[9] not in tier.slab
    tier.slab.put(CHAIN[9], memoryview(content(CHAIN[9])))
    tier.slab.check()
    tier.close()
    again = DiskTier(tmp_path, 4096 + 3 * (PAGE + 64), LAYOUT, "f")
    assert {block for block in CHAIN[:10] if loaded(again, block) == content(block)} == {*CHAIN[1:3], CHAIN[9]}
    again.close()


def test_a_write_that_was_cut_short_is_a_block_that_is_not_kept(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    write = os.pwrite
    monkeypatch.setattr(disk.os, "pwrite", lambda fd, data, at: write(fd, data[:10], at))
    tier.slab.put(CHAIN[0], memoryview(content(CHAIN[0])))
    assert CHAIN[0] not in tier.slab
    assert tier.slab.failed
    tier.close()


@pytest.mark.parametrize("name", ["pages.kv", "index.kv"])
def test_files_that_are_cut_short_under_a_running_worker_cost_what_was_in_them(tmp_path, name):
    """Under a mapping this is SIGBUS."""
    tier = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    for block in CHAIN:
        tier.slab.put(block, memoryview(content(block)))
    os.truncate(tmp_path / name, 20 * PAGE if name == "pages.kv" else 4096 + 20 * 64)
    found = [block for block in CHAIN if loaded(tier, block) == content(block)]
    assert found == (CHAIN[:20] if name == "pages.kv" else CHAIN)
    for block in CHAIN:
        tier.slab.put(block, memoryview(content(block)))
    assert [loaded(tier, block) for block in CHAIN] == [content(block) for block in CHAIN]
    tier.slab.check()
    tier.close()
    again = DiskTier(tmp_path, SIZE, LAYOUT, "f")
    assert all(loaded(again, block) in (None, content(block)) for block in CHAIN)
    again.close()
