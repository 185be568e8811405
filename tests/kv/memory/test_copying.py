"""Copying with views instead of addresses: where a view begins, and that nothing unequal reaches native code."""

from __future__ import annotations

import mmap
import os

import pytest
import xxhash

from baton.kv.memory import block_sums, copying

NOISE = os.urandom(10_000)


def views(size: int, *starts: int) -> list[memoryview]:
    return [memoryview(NOISE)[start : start + size] for start in starts]


@pytest.mark.parametrize("size", [1, 240, 241, 4097])
def test_copies_land_in_their_places_and_have_the_checksums_of_what_lies_there(size: int) -> None:
    memory = memoryview(bytearray(3 * size))
    places = [memory[at * size : (at + 1) * size] for at in (2, 0)]
    sums = copying.copy(places, views(size, 7, 900))
    assert bytes(memory) == NOISE[900 : 900 + size] + bytes(size) + NOISE[7 : 7 + size]
    assert sums == [xxhash.xxh3_64_intdigest(place) for place in places] == copying.checksums(views(size, 7, 900))


def test_read_only_memory_is_a_source() -> None:
    shown = mmap.mmap(-1, 8192, prot=mmap.PROT_READ)
    place = memoryview(bytearray(b"x" * 4096))
    assert copying.copy_from([place], [copying.address(memoryview(shown)) + 4096]) == [
        block_sums.checksum(bytes(4096))
    ]
    assert bytes(place) == bytes(4096)


def test_an_address_is_where_the_view_begins() -> None:
    whole = memoryview(bytearray(100))
    assert copying.address(whole[37:50]) == copying.address(whole) + 37
    assert copying.address(whole[37:50].toreadonly()) == copying.address(whole) + 37


def test_unequal_blocks_are_refused_before_a_byte_is_copied() -> None:
    place = memoryview(bytearray(600))
    with pytest.raises(ValueError, match="equally long"):
        copying.copy_from([place[:300], place[300:599]], [0, 0])
    with pytest.raises(ValueError, match="don't fit"):
        copying.copy([place[:300]], views(299, 0))
    with pytest.raises(ValueError, match="2 blocks for 1 places"):
        copying.copy_from([place], [0, 0])
    with pytest.raises(ValueError, match="equally long"):
        copying.checksums(views(300, 0) + views(301, 0))


@pytest.mark.parametrize("size", [1, 240, 241, 4097])
def test_blocks_are_gathered_behind_a_head_of_their_checksums(size: int) -> None:
    blocks = views(size, 7, 900, 3)
    heads: list[list[int]] = []

    def head(sums: list[int]) -> bytes:
        heads.append(sums)
        return b"head:" + b"".join(said.to_bytes(8, "little") for said in sums)

    made = copying.gather(blocks, head)
    assert isinstance(made, bytes)
    assert heads[-1] == [xxhash.xxh3_64_intdigest(block) for block in blocks]
    assert made == head(heads[-1]) + b"".join(blocks)


def test_a_run_of_blocks_is_scattered_and_checksummed() -> None:
    memory, run = memoryview(bytearray(900)), memoryview(NOISE)[11:611]
    places = [memory[600:900], memory[:300]]
    assert copying.scatter(places, run) == [xxhash.xxh3_64_intdigest(place) for place in places]
    assert bytes(memory) == NOISE[311:611] + bytes(300) + NOISE[11:311]
    with pytest.raises(ValueError, match="don't fit"):
        copying.scatter(places, run[:599])
    with pytest.raises(ValueError, match="equally long"):
        copying.scatter([memory[:300], memory[300:599]], run)


def test_nothing_is_no_work() -> None:
    assert copying.copy([], []) == copying.checksums([]) == copying.scatter([], memoryview(b"")) == []
