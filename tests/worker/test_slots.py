import errno
import multiprocessing
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from baton.process.processes import wait_exit
from baton.worker import slots
from baton.worker.slots import SlotRecord, WorkerSlot, close_slots, holders, slots_closed


def hold(folder: str, ready: "multiprocessing.synchronize.Event") -> None:  # type: ignore[name-defined]
    assert WorkerSlot(folder, "decode-0").acquire()
    ready.set()
    signal.pause()


def start_holder(folder: Path) -> int:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(str(folder), ready), daemon=True)
    process.start()
    assert ready.wait(120)
    assert process.pid
    return process.pid


def test_a_slot_is_held_once_and_free_again_when_its_holder_is_killed(folder: Path) -> None:
    pid = start_holder(folder)
    slot = WorkerSlot(folder, "decode-0")
    assert slot.holder() == pid
    assert holders(folder) == {"decode-0": pid}
    assert not slot.acquire(patience_s=0.05)
    os.kill(pid, signal.SIGKILL)
    assert wait_exit(pid, 60)
    assert slot.holder() is None
    assert slot.acquire()


def test_readers_do_not_keep_a_host_from_its_slot(folder: Path) -> None:
    slot = WorkerSlot(folder, "a")
    assert slot.acquire()
    slot.release()
    for _ in range(50):
        assert slot.holder() is None
        assert slot.acquire()
        assert slot.holder() == os.getpid()
        slot.release()


def test_a_pid_of_one_that_is_gone_is_not_the_holders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between taking the lock and writing its pid, a host's slot still names the one before."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    slot = WorkerSlot(folder, "a")
    assert slot.acquire()
    lock = folder / "a.lock"
    lock.write_text(str(gone.pid))
    assert slot.holder() is None
    monkeypatch.setattr(slots, "NAMED_S", 60.0)
    threading.Timer(0.02, lambda: lock.write_text(str(os.getpid()))).start()
    assert slot.holder() == os.getpid()


def test_a_record_is_read_back_and_belongs_to_its_writer(folder: Path) -> None:
    slot = WorkerSlot(folder, "a")
    assert slot.read() is None
    record = SlotRecord("a", 17, "ready", "i", "h:1")
    slot.write(record)
    assert slot.read() == record
    assert slot.current(17) == record
    assert slot.current(18) is None


def test_half_a_record_is_no_record(folder: Path) -> None:
    (folder / "a.json").write_text('{"slot": "a", "pi')
    assert WorkerSlot(folder, "a").read() is None


def test_a_closed_or_missing_folder_starts_nothing(folder: Path) -> None:
    assert not slots_closed(folder)
    close_slots(folder)
    assert slots_closed(folder)
    assert slots_closed(folder / "gone")


def test_a_worker_goes_on_to_say_what_it_is_on_a_disk_that_is_full(tmp_path, monkeypatch):
    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    slot = WorkerSlot(tmp_path, "decode-0")
    slot.write(SlotRecord("decode-0", 7, "ready", incarnation="a" * 40, role="decode"))
    monkeypatch.setattr(Path, "write_bytes", full)
    slot.write(changed := SlotRecord("decode-0", 7, "ready", role="prefill"))
    assert slot.read() == changed
    assert [path.name for path in tmp_path.iterdir()] == ["decode-0.json"]
    with pytest.raises(OSError, match="No space left"):
        WorkerSlot(tmp_path, "decode-1").write(changed)
