"""Notes to ranks: what one says, and what it costs a process to keep its memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from baton.engine.backends.ranks.notes import AdapterNote, mapped, read, written


def notes_mapped() -> set[int]:
    """Returns the addresses at which this process has notes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.partition("-")[0], 16) for line in lines if "baton-note" in line}


def files_of_notes() -> int:
    """Returns how many memory files of notes this process has open."""
    found = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum("baton-note" in os.readlink(path) for path in found if path.is_symlink())


def test_the_memory_of_a_note_holds_no_file_open_and_is_freed_with_its_last_user() -> None:
    files, kept = files_of_notes(), []
    for number in range(50):
        with written(AdapterNote(number, last=True), memoryview(bytes([number]) * 70)) as (fd, size):
            note, memory = read(os.dup(fd), size)
        assert note == AdapterNote(number, last=True)
        kept.append(np.frombuffer(memory, np.uint8)[:70])
        del memory
    assert files_of_notes() <= files
    own = {matrices.ctypes.data for matrices in kept}
    assert own <= notes_mapped()
    assert all((matrices == number).all() for number, matrices in enumerate(kept))
    kept.clear()
    assert not own & notes_mapped()


def test_a_note_is_read_only_and_what_cannot_be_mapped_is_an_error_that_leaves_no_file() -> None:
    with written(AdapterNote(1)) as (fd, size), pytest.raises(TypeError, match="read-only"):
        read(os.dup(fd), size)[1][0] = 1
    folder = os.open("/proc/self", os.O_RDONLY)
    with pytest.raises(OSError, match="can't be mapped"):
        mapped(folder, 8)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(folder)
