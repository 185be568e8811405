"""The tier that workers share: what one computed another finds, and a bad store costs a miss and nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from baton.kv.layout.page import layout_for
from baton.kv.tiers import shared, writeback
from baton.kv.tiers.blobs import meaning_of, name_of, packed, unpacked
from baton.kv.tiers.folder import PART, FolderStore
from baton.kv.tiers.shared import Patience
from baton.kv.tiers.stack import Tiers
from baton.protos.errors import ConfigError
from tests.kv.sharers import LAYOUT, PAGE, chain, content, settle
from tests.kv.tiers.shared_worker import CHAIN, MEANING, Worker


class BadStore(FolderStore):
    """A folder in which one thing goes wrong: ``what`` names it."""

    def __init__(self, root: Path, what: str) -> None:
        super().__init__(root)
        self.what, self.go_on = what, threading.Event()

    def get(self, name: str, most: int) -> bytes | None:
        if self.what == "slow":
            self.go_on.wait(20)
        if self.what == "gone":
            raise OSError(errno.EIO, "gone")
        if self.what == "broken client":
            raise AttributeError("get")
        blob = super().get(name, most)
        if blob is None:
            return None
        lies = {
            "flipped": lambda: bytes([*blob[:-1], blob[-1] ^ 1]),
            "cut": lambda: blob[:-1],
            "empty": lambda: b"",
            "another's": lambda: packed(MEANING, CHAIN[-1], content(CHAIN[-1])),
            "other weights'": lambda: packed(meaning_of(LAYOUT, "g"), bytes.fromhex(name[-64:]), content(CHAIN[0])),
            "nonsense": lambda: os.urandom(len(blob)),
            "endless": lambda: (blob + bytes(1 << 20))[:most],
        }
        return lies.get(self.what, lambda: blob)()

    def put(self, name: str, blob: bytes) -> None:
        if self.what == "full":
            raise OSError(errno.ENOSPC, "no space left")
        if self.what == "broken client":
            raise KeyError("Size")
        super().put(name, blob)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the store as long as a busy machine takes; a test of slowness says how long itself."""
    monkeypatch.setattr(shared, "LOOK_S", 20.0)
    monkeypatch.setattr(shared, "FIRST_READ_S", 20.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


async def test_what_one_worker_computed_another_finds(folder):
    first, second = Worker(FolderStore(folder)), Worker(FolderStore(folder))
    await first.share(CHAIN[:12])
    assert await second.find(CHAIN) == 12
    assert (first.shared.stored, second.shared.loaded, len(second.shared)) == (12, 12, 12)
    assert await second.find(chain(5, salt=9)) == 0
    await first.close()
    await second.close()


async def test_a_block_is_written_once_however_often_it_becomes_idle(folder):
    worker = Worker(FolderStore(folder))
    for _ in range(3):
        await worker.share(CHAIN[:6])
    assert worker.shared.stored == 6
    await worker.close()


@pytest.mark.parametrize("what", ["flipped", "cut", "empty", "another's", "other weights'", "nonsense", "endless"])
async def test_a_store_that_lies_costs_a_miss_and_loses_the_blob(folder, what):
    writer, reader = Worker(FolderStore(folder)), Worker(BadStore(folder, what))
    await writer.share(CHAIN[:4])
    assert await reader.find(CHAIN[:4]) == 0
    assert reader.shared.damaged >= 1
    assert not FolderStore(folder).has(name_of(MEANING, CHAIN[0]))
    await writer.close()
    await reader.close()


async def test_a_store_that_is_gone_or_full_is_left_alone_for_a_while_and_then_asked_again(folder):
    for what in ("gone", "full", "broken client"):
        store = BadStore(folder, what)
        writer, reader = Worker(store), Worker(store)
        await writer.share(CHAIN[:4])
        assert await reader.find(CHAIN[:4]) == 0
        failed = writer.shared.failed + reader.shared.failed
        assert failed > 0
        await writer.share(CHAIN[4:8])
        assert await reader.find(CHAIN[:8]) == 0
        assert writer.shared.failed + reader.shared.failed <= failed + (what != "full")
        store.what = ""
        writer.now = reader.now = 100.0
        await writer.share(CHAIN[:8])
        assert await reader.find(CHAIN[:8]) == 8
        await writer.close()
        await reader.close()
        for entry in list(store.entries()):
            store.remove(entry.name)


async def test_a_store_that_hangs_holds_nobody_up(folder, monkeypatch):
    monkeypatch.setattr(shared, "FIRST_READ_S", 0.05)
    writer, store = Worker(FolderStore(folder)), BadStore(folder, "slow")
    reader = Worker(store)
    await writer.share(CHAIN[:8])
    assert await reader.find(CHAIN[:8]) == 0
    assert reader.shared.failed > 0
    assert await reader.find(CHAIN[:8]) == 0, "it is left alone"
    store.go_on.set()
    await writer.close()
    await reader.close()


async def test_a_full_queue_drops_blocks_and_keeps_its_bound(folder, monkeypatch):
    monkeypatch.setattr(shared, "QUEUE_BYTES", 4 * PAGE)
    worker = Worker(FolderStore(folder))
    pages = [memoryview(content(block)) for block in CHAIN]
    await worker.shared.offer(CHAIN, pages)
    assert len(worker.shared._queue) <= 4
    assert worker.shared.dropped == 16
    await worker.shared.settled()
    await worker.close()


async def test_the_store_stays_within_its_bound_and_loses_what_was_unused_longest(folder, monkeypatch):
    monkeypatch.setattr(shared, "TRIM_EVERY", 2)
    store = FolderStore(folder)
    blob = len(packed(MEANING, CHAIN[0], content(CHAIN[0])))
    worker = Worker(store, most_bytes=6 * blob)
    for block in CHAIN[:9]:
        await worker.share([block])
        past = time.time() - 3600 + 10 * len(worker.shared)
        os.utime(folder / name_of(MEANING, block), (past, past))
    await worker.share([CHAIN[9], CHAIN[10]])
    names = {entry.name for entry in store.entries()}
    assert len(names) <= 7
    assert name_of(MEANING, CHAIN[10]) in names
    assert name_of(MEANING, CHAIN[0]) not in names
    assert worker.shared.evicted > 0
    await worker.close()


async def test_what_others_keep_in_the_folder_is_neither_removed_nor_counted(folder, monkeypatch):
    monkeypatch.setattr(shared, "TRIM_EVERY", 2)
    blob = len(packed(MEANING, CHAIN[0], content(CHAIN[0])))
    worker = Worker(FolderStore(folder), most_bytes=4 * blob)
    others = [folder / "thesis.tex", folder / MEANING.hex()[:32] / "ab" / "notes"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(8 * blob))
        os.utime(path, (0, 0))
    await worker.share(CHAIN[:3])
    assert all(path.exists() for path in others)
    assert worker.shared.evicted == 0
    await worker.close()


async def test_prompts_that_come_at_once_all_find_their_blocks(folder):
    writer, store = Worker(FolderStore(folder), pages=40), BadStore(folder, "slow")
    reader, chains = Worker(store, pages=40), [chain(4, salt=n) for n in range(6)]
    for hashes in chains:
        await writer.share(hashes)
        for block in hashes:
            reader.shared._note(block)  # else a search waits for the threads that others' reads hold
    finds = [asyncio.create_task(reader.warmer._take_shared(hashes, 0)) for hashes in chains]
    while len(reader.filler._asked) < 6:
        await asyncio.sleep(0)
    store.go_on.set()
    assert await asyncio.gather(*finds) == [4] * 6
    assert [await reader.find(hashes) for hashes in chains] == [4] * 6
    await writer.close()
    await reader.close()


async def test_a_caller_that_is_cancelled_while_pages_are_copied_waits_for_the_copy(folder, monkeypatch):
    began, go_on = threading.Event(), threading.Event()

    def copied(pages: Sequence[memoryview]) -> list[bytes]:
        began.set()
        go_on.wait(20)
        return [bytes(page) for page in pages]

    monkeypatch.setattr(shared, "_copied", copied)
    worker = Worker(FolderStore(folder))
    task = asyncio.create_task(worker.shared.offer(CHAIN[:1], [memoryview(content(CHAIN[0]))]))
    await asyncio.to_thread(began.wait, 20)
    task.cancel()
    await settle()
    assert not task.done()
    go_on.set()
    with suppress(asyncio.CancelledError):
        await task
    await worker.close()


def test_a_blob_is_taken_for_nothing_but_itself():
    page = content(CHAIN[0])
    blob = packed(MEANING, CHAIN[0], page)
    assert bytes(unpacked(blob, MEANING, CHAIN[0], PAGE) or b"") == page
    assert unpacked(blob, MEANING, CHAIN[1], PAGE) is None
    assert unpacked(blob, meaning_of(layout_for("float32", 1, 1, 8), "f"), CHAIN[0], PAGE) is None
    for place in range(0, len(blob), 7):
        bad = bytearray(blob)
        bad[place] ^= 4
        assert unpacked(bytes(bad), MEANING, CHAIN[0], PAGE) is None


def test_patience_doubles_with_each_failure_and_ends_with_an_answer():
    now = [0.0]
    patience = Patience(lambda: now[0])
    rests = []
    for _ in range(8):
        patience.failed()
        rests.append(patience._until - now[0])
        now[0] += 1000
    assert rests[:3] == [1.0, 2.0, 4.0]
    assert rests[-1] == 60.0
    patience.answered()
    patience.failed()
    assert patience._until - now[0] == 1.0


def test_a_folder_keeps_nothing_half_written_and_says_what_it_can_not_write(folder, tmp_path, monkeypatch):
    store = FolderStore(folder)
    monkeypatch.setattr(Path, "replace", _refuse)
    with pytest.raises(OSError, match="refused"):
        store.put("a/b/c", b"blob")
    monkeypatch.undo()
    assert list(store.entries()) == []
    stale = folder / f"{PART}old"
    stale.write_bytes(b"x")
    os.utime(stale, (0, 0))
    assert list(store.entries()) == []
    assert not stale.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"set another worker\.shared_tier"):
        FolderStore(tmp_path / "file" / "under")


def _refuse(*args: object) -> None:
    raise OSError("refused")


class HungTiers(Tiers):
    """A worker's own tiers, which take nothing and say nothing."""

    async def store(self, blocks: Sequence[bytes], pages: Sequence[memoryview]) -> set[bytes]:
        await asyncio.Event().wait()
        raise AssertionError("nobody ends it")


async def test_blocks_are_shared_although_a_tier_of_the_workers_own_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(writeback, "STALL_S", 0.01)
    worker = Worker(FolderStore(tmp_path))
    worker.writeback._tiers = HungTiers([])
    await worker.share(CHAIN)
    await worker.close()
    other = Worker(FolderStore(tmp_path))
    assert await other.find(CHAIN) == len(CHAIN)
    await other.close()
