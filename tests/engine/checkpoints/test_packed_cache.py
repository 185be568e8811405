"""Packed weights on disk: what comes back, and what damage does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from baton.engine.checkpoints import packed_cache
from baton.engine.checkpoints.packed_cache import CacheDamaged, packed_weights, read
from baton.kernels.linear.packed import PackedWeight, pack_bf16, quantize


def made() -> dict[str, PackedWeight]:
    torch.manual_seed(0)
    return {
        "plain": pack_bf16(torch.randn(70, 40)),
        "eight": quantize(torch.randn(70, 40), 8, 0),
        "four": quantize(torch.randn(70, 96), 4, 32),
    }


def unmade() -> dict[str, PackedWeight]:
    raise AssertionError("should have come from the cache")


def the_file(directory: Path) -> Path:
    return next((directory / "weights").glob("*.baton"))


def test_what_was_made_once_comes_back_without_being_made(tmp_path: Path) -> None:
    first = packed_weights("abc", "int8", made, str(tmp_path))
    again = packed_weights("abc", "int8", unmade, str(tmp_path))
    for name, weight in made().items():
        for found in (first[name], again[name]):
            assert (found.kind, found.n, found.k, found.group) == (weight.kind, weight.n, weight.k, weight.group)
            assert torch.equal(found.dequantized(), weight.dequantized())
            assert found.data.data_ptr() % 64 == 0


def test_another_checkpoint_or_scheme_is_another_file(tmp_path: Path) -> None:
    packed_weights("abc", "int8", made, str(tmp_path))
    calls: list[int] = []

    def counted() -> dict[str, PackedWeight]:
        calls.append(1)
        return made()

    packed_weights("abd", "int8", counted, str(tmp_path))
    packed_weights("abc", "int4", counted, str(tmp_path))
    assert len(calls) == 2


@pytest.mark.parametrize("at", [3, 17, 200, -1])
def test_a_flipped_byte_anywhere_is_seen_and_the_file_made_again(tmp_path: Path, at: int) -> None:
    packed_weights("abc", "int8", made, str(tmp_path))
    path = the_file(tmp_path)
    raw = bytearray(path.read_bytes())
    if at == -1:  # the last byte that counts, not padding
        at = max(i for i, byte in enumerate(raw) if byte)
    raw[at] ^= 0x10
    path.write_bytes(raw)
    with pytest.raises(CacheDamaged):
        read(path)
    found = packed_weights("abc", "int8", made, str(tmp_path))
    assert torch.equal(found["four"].dequantized(), made()["four"].dequantized())
    assert read(path)


@pytest.mark.parametrize("size", [0, 10, 700])
def test_a_truncated_file_is_made_again(tmp_path: Path, size: int) -> None:
    packed_weights("abc", "int8", made, str(tmp_path))
    path = the_file(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    assert set(packed_weights("abc", "int8", made, str(tmp_path))) == set(made())


def test_workers_that_start_together_make_it_once(tmp_path: Path) -> None:
    calls, found = [], []

    def slow() -> dict[str, PackedWeight]:
        calls.append(1)
        return made()

    starts = [
        threading.Thread(target=lambda: found.append(packed_weights("abc", "int8", slow, str(tmp_path))))
        for _ in range(4)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert (len(calls), len(found)) == (1, 4)


def test_without_a_place_to_write_weights_are_made_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert set(packed_weights("abc", "int8", made, str(tmp_path / "file"))) == set(made())


def test_a_header_of_any_size_leaves_room_for_itself(tmp_path: Path) -> None:
    many = {f"layer.{i}": quantize(torch.randn(1, 8), 8, 0) for i in range(200)}
    path = tmp_path / "x.baton"
    packed_cache._write(path, many)
    assert set(read(path)) == set(many)
