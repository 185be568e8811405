"""Tests page memory: one set of bytes under two mappings."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest

from baton.kv.memory import host_pages as kv_memory
from baton.kv.memory.host_pages import RESERVED, SMALL, TRANSPARENT, PageMemory, drop_bytes
from baton.protos.errors import ConfigError


def test_two_mappings_show_the_same_bytes() -> None:
    made = PageMemory.create(3, 100)
    seen = PageMemory.attach(os.dup(made.fd), 3, 100)
    made.page(1)[:] = b"x" * 100
    assert bytes(seen.view()) == bytes(100) + b"x" * 100 + bytes(100)
    made.close()
    assert bytes(seen.page(1)) == b"x" * 100, "the pages live as long as one mapping does"
    seen.close()


def test_memory_that_is_given_back_reads_as_zeros_in_every_process_and_its_neighbours_stay() -> None:
    size = 3 * mmap.PAGESIZE
    made = PageMemory.create(3, size, sparse=True)
    seen = PageMemory.attach(os.dup(made.fd), 3, size)
    made.view()[:] = b"x" * (3 * size)
    drop_bytes(made.view(), size, size)
    assert bytes(seen.view()) == b"x" * size + bytes(size) + b"x" * size
    drop_bytes(made.view(), 1, mmap.PAGESIZE)
    assert bytes(seen.page(0)) == b"x" * size, "it holds no whole page of the kernel"


def test_pages_may_be_more_than_the_hosts_memory_where_few_of_them_are_written() -> None:
    size = 1 << 30
    count = 2 * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // size
    made = PageMemory.create(count, size, sparse=True)
    made.page(count - 1)[-1] = 1
    assert made.page(count - 1)[-2:] == b"\0\1"
    made.close()


def test_a_page_outside_is_refused() -> None:
    memory = PageMemory.create(2, 16)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            memory.page(index)


def test_memory_of_another_size_is_refused_by_name() -> None:
    made = PageMemory.create(2, 16)
    with pytest.raises(ConfigError, match="32 bytes, not 3 pages x 16"):
        PageMemory.attach(made.fd, 3, 16)


def test_no_process_can_shrink_pages_that_are_mapped() -> None:
    made = PageMemory.create(2, 4096)
    for size in (0, 3 * 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, size)


def test_closing_twice_or_under_a_living_view_is_harmless() -> None:
    memory = PageMemory.create(2, 16)
    page = memory.page(0)
    memory.close()
    memory.close()
    page[:] = b"y" * 16
    assert bytes(page) == b"y" * 16


def test_pages_that_nobody_knows_any_more_leave_no_descriptor() -> None:
    gc.collect()  # what earlier tests left may close descriptors meanwhile
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        PageMemory.create(2, 64).page(1)[:] = b"x" * 64
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(("pages", "page_bytes"), [(0, 16), (1, 0)])
def test_memory_without_pages_is_refused(pages: int, page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="at least one page"):
        PageMemory.create(pages, page_bytes)


def kernel_that_says(folder: Path, mode: str, free: int = 0, claimed: int = 0) -> Path:
    (folder / "transparent_hugepage").mkdir()
    modes = ("always", "within_size", "advise", "never", "deny", "force")
    text = " ".join(f"[{name}]" if name == mode else name for name in modes)
    (folder / "transparent_hugepage" / "shmem_enabled").write_text(text + "\n")
    reserve = folder / "hugepages" / f"hugepages-{kv_memory._huge_bytes() >> 10}kB"
    reserve.mkdir(parents=True)
    (reserve / "free_hugepages").write_text(f"{free}\n")
    (reserve / "resv_hugepages").write_text(f"{claimed}\n")
    return folder


@pytest.mark.parametrize(
    ("mode", "huge"), [("always", True), ("within_size", True), ("advise", True), ("never", False), ("deny", False)]
)
def test_transparent_huge_pages_are_had_where_the_kernel_says_so(tmp_path: Path, mode: str, huge: bool) -> None:
    assert kv_memory.transparent(kernel_that_says(tmp_path, mode)) is huge


def test_reserved_huge_pages_that_others_have_claimed_are_not_counted(tmp_path: Path) -> None:
    kernel = kernel_that_says(tmp_path, "never", free=5, claimed=3)
    assert kv_memory._reserve_bytes(kernel) == 2 * kv_memory._huge_bytes()


def test_a_kernel_that_says_nothing_has_no_huge_pages(tmp_path: Path) -> None:
    assert not kv_memory.transparent(tmp_path)
    assert kv_memory._reserve_bytes(tmp_path) == 0


def test_both_processes_find_the_same_backing_and_it_is_what_the_host_offers() -> None:
    made = PageMemory.create(3, (1 << 20) + 64)
    seen = PageMemory.attach(os.dup(made.fd), 3, (1 << 20) + 64)
    assert made.backing == seen.backing
    assert made.backing in ((TRANSPARENT,) if kv_memory.transparent() else (RESERVED, SMALL))
    made.page(2)[-8:] = b"the end."
    assert bytes(seen.page(2)[-8:]) == b"the end."
    assert len(made.view()) == len(seen.view()) == 3 * ((1 << 20) + 64), "it shows no more than was asked"


def test_reserved_huge_pages_that_are_gone_when_we_ask_are_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_memory, "transparent", lambda: False)
    monkeypatch.setattr(kv_memory, "_reserve_bytes", lambda: 1 << 60)  # what it said a moment ago
    made = PageMemory.create(1 << 10, 1 << 30)  # a TiB: no host sets that aside
    assert made.backing == SMALL
    made.close()
