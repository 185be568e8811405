"""The process that reads adapters while the engine serves: its outcomes, its ends and its pace."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.engine.adapters import reading
from baton.engine.adapters.pace import LONGEST_S, PIECE_S, SHARE, Pace, expected_s, share_for
from baton.engine.adapters.packed import PackedAdapter
from baton.engine.adapters.reader import read_adapter
from baton.engine.adapters.reading import AdapterReader, room
from baton.engine.adapters.table import ReadAdapter, Reading
from baton.protos.channel import AdapterPlace
from baton.protos.errors import AdapterChanged, AdapterRefused, BatonError, Unavailable
from tests.engine.adapters.adapter_files import write
from tests.engine.adapters.reading_rig import BASE, adapter, model, read

__all__ = ["adapter", "model"]


LOW = reading.NICE


def outcome(begun: Reading) -> ReadAdapter | BatonError:
    until = time.monotonic() + 60
    while (found := begun.result()) is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    begun.close()
    return found


@pytest.fixture(scope="module")
def reader() -> Iterator[AdapterReader]:
    """One for all tests; a process that a test has killed is started again at once, whatever else runs here."""
    made = AdapterReader(BASE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "NICE", 0)
        yield made
    made.close()


def pid_of(reader: AdapterReader) -> int:
    assert reader._server is not None
    return reader._server.pid


def test_a_process_of_its_own_reads_the_same(adapter: Path, reader: AdapterReader) -> None:
    wanted = read(adapter)
    pids = set()
    for _ in range(2):  # both by children of one process
        found = outcome(reader.start(AdapterPlace("sql", str(adapter))))
        assert isinstance(found, ReadAdapter)
        assert found.info == wanted.info
        assert found.packed.parts == wanted.packed.parts
        assert bytes(found.packed.memory) == bytes(wanted.packed.memory)
        pids.add(pid_of(reader))
    assert len(pids) == 1
    assert os.getpriority(os.PRIO_PROCESS, pids.pop()) == max(LOW, os.getpriority(os.PRIO_PROCESS, 0))


def test_what_it_refuses_is_told_and_a_reader_that_is_ended_is_named(adapter: Path, reader: AdapterReader) -> None:
    refused = outcome(reader.start(AdapterPlace("sql", str(adapter), digest="0" * 16)))
    assert isinstance(refused, AdapterChanged)
    os.kill(pid_of(reader), signal.SIGSTOP)
    begun = reader.start(AdapterPlace("sql", str(adapter)))
    os.kill(pid_of(reader), signal.SIGKILL)
    ended = outcome(begun)
    assert isinstance(ended, Unavailable)
    assert "the process that read it ended; load it again" in ended.message


def test_a_child_that_needs_too_much_is_ended_and_the_next_adapter_is_read(
    adapter: Path, tmp_path: Path, model: Path, reader: AdapterReader
) -> None:
    endless = {"rank_pattern": {r"([\w.]+)+!": 4}}  # a pattern that backtracks for minutes over a module's name
    long = write(tmp_path / "long", model, ("q_proj",), **endless)
    begun = reader.start(AdapterPlace("long", str(long)))
    server = pid_of(reader)
    child = wait_for(lambda: children_of(server))
    os.kill(child, signal.SIGKILL)  # as the limit of CPU time does
    ended = outcome(begun)
    assert isinstance(ended, AdapterRefused)
    assert "ended its reader (status -9)" in ended.message
    assert isinstance(outcome(reader.start(AdapterPlace("sql", str(adapter)))), ReadAdapter)
    assert pid_of(reader) == server


def children_of(pid: int) -> int:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found[0]) if found else 0


def wait_for(found: Callable[[], int]) -> int:
    until = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < until
        time.sleep(0.005)
    return value


def test_a_process_that_was_killed_while_it_waited_costs_nobody_a_load(
    adapter: Path, reader: AdapterReader
) -> None:
    reader.warm()
    assert reader._server is not None
    first = reader._server
    first._process.kill()
    first._process.wait()
    assert isinstance(outcome(reader.start(AdapterPlace("sql", str(adapter)))), ReadAdapter)
    assert pid_of(reader) != first.pid


def test_a_load_that_is_given_up_holds_up_no_other(adapter: Path, reader: AdapterReader) -> None:
    reader.warm()
    first = pid_of(reader)
    os.kill(first, signal.SIGSTOP)  # as in a file system that hangs
    begun = reader.start(AdapterPlace("sql", str(adapter)))
    assert begun.result() is None
    begun.close()
    assert isinstance(outcome(reader.start(AdapterPlace("sql", str(adapter)))), ReadAdapter)
    assert pid_of(reader) != first


def test_an_adapters_memory_is_freed_with_it_and_no_descriptor_is_left(
    settled_heap: None, adapter: Path, reader: AdapterReader
) -> None:
    def descriptors() -> tuple[int, int]:
        own, theirs = "/proc/self/fd", f"/proc/{pid_of(reader)}/fd"
        gc.collect()  # what tests before have left has descriptors too
        return len(os.listdir(own)), len(os.listdir(theirs))

    assert isinstance(outcome(reader.start(AdapterPlace("sql", str(adapter)))), ReadAdapter)
    first = descriptors()
    found = outcome(reader.start(AdapterPlace("sql", str(adapter))))
    assert isinstance(found, ReadAdapter)
    held = descriptors()
    assert held[0] > first[0]
    del found
    assert descriptors()[0] == first[0]
    again = outcome(reader.start(AdapterPlace("sql", str(adapter))))  # behind what it was told to free
    assert descriptors() == held
    del again


def test_a_machine_without_a_process_to_spare_refuses_the_load_and_leaks_nothing(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", none_left)
    gc.collect()  # what tests before have left has descriptors too
    before, reader = len(os.listdir("/proc/self/fd")), AdapterReader(BASE)
    reader.warm()
    found = reader.start(AdapterPlace("sql", str(adapter))).result()
    assert isinstance(found, Unavailable)
    assert "no process to read it" in found.message
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_pauses_after_each_piece_and_for_long_where_others_want_the_core() -> None:
    ran, waited, slept = [0.0], [0.0], list[float]()
    pace = Pace(lambda: ran[0], lambda: waited[0], slept.append)
    pace()
    assert slept == []
    ran[0] += PIECE_S
    pace()
    pace()
    assert slept == [PIECE_S]
    ran[0], waited[0] = ran[0] + 2 * PIECE_S, 0.01
    pace()
    assert slept[1:] == [pytest.approx(2 * PIECE_S / SHARE - 2 * PIECE_S - 0.01)]
    ran[0], waited[0] = ran[0] + 1.5 * PIECE_S, 60.0
    pace()
    assert slept[2:] == [pytest.approx(1.5 * PIECE_S)]


def test_a_large_adapter_takes_a_larger_share_and_no_longer_than_a_bound() -> None:
    assert [share_for(seconds) for seconds in (0.05, 1.0, 3.0, 60.0)] == [SHARE, 0.1, 0.3, 0.5]


class Beside:
    """A core that others want all the time, in virtual time: work of ``seconds`` on it in pieces."""

    def __init__(self, size: int, tensors: int, factor: float = 1.0) -> None:
        self.ran = self.waited = self.slept = 0.0
        pace = Pace(lambda: self.ran, lambda: self.waited, self.sleep)
        seconds = factor * expected_s(size, tensors)
        pace.expect(size, tensors)
        while self.ran < seconds:
            self.ran, self.waited = self.ran + PIECE_S, self.waited + PIECE_S
            pace()

    @property
    def seconds(self) -> float:
        return self.ran + self.waited + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


@pytest.mark.parametrize(("size", "tensors"), [(0, 36_864), (400 << 20, 0), (400 << 20, 36_864)])
def test_many_tensors_and_many_bytes_are_there_in_the_same_time(size: int, tensors: int) -> None:
    assert 0.8 * LONGEST_S < Beside(size, tensors).seconds <= LONGEST_S


def test_work_that_takes_longer_than_was_expected_takes_a_larger_share_by_and_by() -> None:
    twice, tenfold = (Beside(0, 36_864, factor).seconds for factor in (2.0, 10.0))
    assert LONGEST_S < twice < 1.5 * LONGEST_S
    assert tenfold < 3 * LONGEST_S


def test_the_process_that_reads_paces_what_it_does_before_the_first_tensor_too(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, read_at = [0], []

    def paced() -> None:
        calls[0] += 1

    def memory(size: int, tensors: int) -> memoryview:
        read_at.append((calls[0], tensors))
        return room(size)

    read_adapter(AdapterPlace("sql", str(adapter)), BASE, memory, paced)
    ((before, tensors),) = read_at
    assert tensors == 8
    assert before >= 2 * tensors, "the header's entries, and their matching with the model"


def test_tensors_are_read_in_short_pieces_with_the_same_outcome(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def packed() -> tuple[ReadAdapter, int]:
        pieces = list[None]()
        content, memory = read_adapter(
            AdapterPlace("sql", str(adapter)), BASE, lambda size, _: room(size), lambda: pieces.append(None)
        )
        return ReadAdapter(content.info, PackedAdapter(content.parts, memory)), len(pieces)

    whole, few = packed()
    monkeypatch.setattr("baton.engine.adapters.reader.PIECE_BYTES", 1)
    cut, many = packed()
    assert many > few
    assert cut.info == whole.info
    assert bytes(cut.packed.memory) == bytes(whole.packed.memory)
