"""Page memory: one set of bytes, two mappings."""

from __future__ import annotations

import os

import pytest

from baton.kv.memory import PageMemory
from baton.protos.errors import ConfigError


def test_two_mappings_show_the_same_bytes() -> None:
    made = PageMemory.create(3, 100)
    seen = PageMemory.attach(os.dup(made.fd), 3, 100)
    made.page(1)[:] = b"x" * 100
    assert bytes(seen.view()) == bytes(100) + b"x" * 100 + bytes(100)
    made.close()
    assert bytes(seen.page(1)) == b"x" * 100, "the pages live as long as one mapping does"
    seen.close()


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


@pytest.mark.parametrize(("pages", "page_bytes"), [(0, 16), (1, 0)])
def test_memory_without_pages_is_refused(pages: int, page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="at least one page"):
        PageMemory.create(pages, page_bytes)
