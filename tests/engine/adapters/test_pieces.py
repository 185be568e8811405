"""Counts the calls of the step loop for an adapter between two steps: the longest piece doesn't grow with it."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from baton.engine.adapters import reading
from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import PackedAdapter, PackedPart
from baton.engine.adapters.part_table import PartTable
from baton.engine.adapters.reading import AdapterReader
from baton.engine.adapters.table import AdapterTable
from baton.engine.adapters.tensors import FILE
from baton.engine.backends.native import adapter_structs
from baton.engine.backends.native.adapter_structs import PIECE_PARTS, AdapterStructs, address_of
from baton.engine.backends.native.adapters import NativeAdapters
from baton.engine.program.sites import Site
from baton.engine.steps.loop import READ_WAIT_S
from baton.kernels.abi.native import BF16, F32
from baton.kernels.lora.structs import LoraPart, LoraSite, LoraStep
from baton.protos import channel as ch
from baton.protos.nouns import AdapterLimits

WIDTH, RANK, EXPERTS = 8, 2, 64
FEW, MANY = 3, 3000  # modules
MOST_CALLS, MOST_ANSWER = 400, 4096  # of a piece: calls of Python and C, bytes decoded


def experts(count: int) -> dict[str, Site]:
    """Sites of ``count`` modules: EXPERTS of each weight."""
    places = (divmod(at, EXPERTS) for at in range(count))
    return {f"model.{number}.experts.{e}.w": Site(number, e * WIDTH, WIDTH, WIDTH) for number, e in places}


def written(directory: Path, sites: dict[str, Site]) -> Path:
    directory.mkdir()
    matrix = np.ones((RANK, WIDTH), np.float32)
    halves = {"lora_A": matrix, "lora_B": matrix.T.copy()}
    tensors = {f"base_model.model.{module}.{k}.weight": v for module in sites for k, v in halves.items()}
    save_file(tensors, directory / FILE)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def calls_of(work: Callable[[], object]) -> int:
    """Calls ``work`` and returns how many calls of Python and C functions it made."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def pieces_of(directory: Path, sites: dict[str, Site], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of each turn of an engine's table from the end of an adapter's reading on, until it is held."""
    base = AdapterBase(sites, 64, 1 << 30)
    host, reader = NativeAdapters(base, 1 + len(sites) // EXPERTS, LoraStep()), AdapterReader(base)
    table, found = AdapterTable(host, AdapterLimits(2, 1 << 30, 64), reader.start), list[int]()
    whole, answers = reading._whole, list[int]()

    def measured(file: int) -> bytes:
        answers.append(len(read := whole(file)))
        return read

    monkeypatch.setattr(reading, "_whole", measured)
    told, until = (
        [*table.load(ch.LoadAdapter(1, ch.AdapterPlace("a", str(directory)), False))],
        time.monotonic() + 120,
    )
    while table.reading:
        if not table.holding:
            time.sleep(READ_WAIT_S)
        found.append(calls_of(lambda: told.extend(table.turn())))
        assert time.monotonic() < until
    reader.close()
    assert isinstance(told[0], ch.AdapterIs), told
    assert max(answers) <= MOST_ANSWER
    return found


@pytest.mark.thorough  # the next test bounds the parts of a piece
def test_the_longest_piece_of_a_load_is_no_longer_for_thousands_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (
        pieces_of(written(tmp_path / str(count), experts(count)), experts(count), monkeypatch)
        for count in (FEW, MANY)
    )
    assert max(many) <= max(few) + 20 * (MANY // PIECE_PARTS)  # of arrays that are joined, a few calls each
    assert max(many) <= MOST_CALLS


def test_structs_are_made_of_a_bounded_number_of_parts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, sizes, make = PartTable.of(parts(3000)).rows, list[int](), adapter_structs._structs
    monkeypatch.setattr(
        adapter_structs, "_structs", lambda some, base: (sizes.append(len(some)), make(some, base))[1]
    )
    structs = AdapterStructs()
    assert len(list(structs.add(rows, 0))) == len(sizes) == 3
    assert max(sizes) == PIECE_PARTS


def parts(count: int) -> list[PackedPart]:
    """Parts of two sites in turn, those of a site in no order."""
    return [
        PackedPart(
            Site(1 + at % 2, 8 * (at * 7 % count), 8, 16, at % 3 == 0), 2 + at % 5, 0.5 + at, at % 4 == 0, at, -at
        )
        for at in range(count)
    ]


def test_structs_are_those_that_are_made_of_one_part_after_the_other() -> None:
    held = PackedAdapter(tuple(parts(50)), memoryview(bytearray(64)))
    structs, base = AdapterStructs(), address_of(held.memory)
    list(structs.add(PartTable.of(held.parts).rows, base))
    structs.join()
    structs.place(address_of(structs.parts), 4)
    found = (LoraPart * 50).from_address(address_of(structs.parts))
    for struct, part in zip(found, sorted(held.parts, key=lambda p: (p.site.number, p.site.first)), strict=True):
        site = part.site
        assert (struct.a, struct.b) == (base + part.a, base + part.b)
        assert (struct.k, struct.first, struct.n) == (site.inputs, site.first, site.outputs)
        assert (struct.rank, struct.dtype) == (part.rank, BF16 if part.narrow else F32)
        assert (struct.scale, bool(struct.looked_up)) == (part.scale, site.looked_up)
    sites = (LoraSite * 4).from_address(address_of(structs.sites))
    assert [site.count for site in sites] == [0, 25, 25, 0]
    assert sites[2].parts - sites[1].parts == 25 * ctypes.sizeof(LoraPart)
    assert sites[1].parts == address_of(structs.parts)


def test_a_table_of_parts_is_a_sequence_of_them() -> None:
    plain = sorted(parts(20), key=lambda part: (part.site.number, part.site.first))
    table = PartTable.of(parts(20))
    assert list(table) == plain
    assert (table[3], len(table), list(table[2:5])) == (plain[3], 20, plain[2:5])
    assert table == PartTable.of(plain)
    assert table != PartTable.of(plain[:19])
