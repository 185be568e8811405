"""Adapters on several ranks answer as on one rank to the bit, whatever ranks share; loaded, dropped, replaced."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from baton.engine.abilities import adapters_of
from baton.engine.adapters.packed import PackedPart
from baton.engine.adapters.part_table import PartTable
from baton.engine.adapters.reading import AdapterReader, read_here
from baton.engine.adapters.table import ReadAdapter
from baton.engine.backends.native.adapter_structs import PIECE_PARTS
from baton.engine.backends.ranks import adapters, notes
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner, SequenceStep, StepPlan
from baton.engine.program.sites import Site
from baton.kernels.abi import native
from baton.protos.channel import AdapterPlace
from baton.protos.errors import AdapterNotLoaded
from baton.protos.nouns import AdapterLimits, Sampling
from tests.conformance.checkpoints import make
from tests.e2e.fleet import wait_for
from tests.engine.adapters.adapter_files import EVERYWHERE, EXPERTS, MIXTRAL, write
from tests.engine.adapters.test_equality import SAMPLES, hold
from tests.engine.backends.ranks.threads import SharedDriver, on_ranks
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

LIMITS = AdapterLimits(2, 1 << 30, 64)
ALL = (*EVERYWHERE, EXPERTS, *MIXTRAL)
SPOKEN = Sampling(temperature=0.0, max_tokens=6, logprobs=1)
READ = Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=1, pooling="mean")
PROMPTS = [[5, 6, 7, 8, 9] * 31, [3, 4], [11, 12, 13] * 6]
CASES = [
    ("qwen2_mixed", "tp"), ("mixtral", "ep"), ("mixtral", "pp"), ("qwen2_mixed", "tp+pp"), ("olmo2", "tp"),
    ("llama3", "cp"), ("qwen2_mixed", "cp"), ("qwen2_mixed", "pp"),
    ("mixtral", "tp"), ("phi3", "tp"), ("gemma2", "tp"), ("gemma2", "pp"), ("qwen3_moe", "cp"), ("gpt_oss", "tp"),
    ("qwen3_moe", "tp+pp"), ("qwen3_moe", "ep"), ("gemma3n", "tp"), ("gemma3n", "cp"), ("gemma3n", "tp+pp"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "share"), first_now(CASES, 2))
@pytest.mark.parametrize("fields", first_now([{}, {"quantization": "int8"}], 1), ids=str)
def test_adapters_give_the_bits_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, share: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(Path(native.built(native.isa())).parents[1]))
    monkeypatch.setattr(adapters, "PIECE_PARTS", 3)  # so that adapters come in several notes
    model = make(tmp_path / "model", kind)
    few = write(tmp_path / "few", model, ("q_proj", "v_proj", "qkv_proj"), rank=4, seed=2)
    many = write(tmp_path / "many", model, ALL, rank=16, seed=3)
    again = write(tmp_path / "again", model, ALL, rank=8, seed=4)
    config = EngineConfig(str(model), threads=1, adapters=LIMITS, cache_dir=str(tmp_path / "cache"), **fields)
    alone = load_runner(config)
    ranks = on_ranks(
        alone.spec, EngineConfig(**{**config_fields(config), **dict.fromkeys(share.split("+"), 2)}), base_of(alone)
    )
    one, several = (SharedDriver(runner, 64, chunk=150) for runner in (alone, ranks))
    try:
        names = [(hold(runner, "few", few), "", hold(runner, "many", many)) for runner in (alone, ranks)]
        assert names[0] == names[1]
        same(one, several, [*names[0]])
        for runner in (alone, ranks):
            host = adapters_of(runner)
            assert host is not None
            host.drop(names[0][0])
        monkeypatch.setattr(adapters_of(ranks), "_shares", False)  # as if other ranks were on other hosts
        other, _ = (hold(runner, "again", again) for runner in (alone, ranks))
        same(one, several, [names[0][2], other, ""])
        with pytest.raises(AdapterNotLoaded, match="few@"):
            ranks.run(StepPlan((SequenceStep(1, [1], 0, [0], adapter=names[0][0]),)))
    finally:
        ranks.leave()


@pytest.mark.parametrize("fields", [{"ep": 2, "expert_replicas": 1}, {"tp": 2}], ids=str)
def test_what_peft_saved_of_parameters_of_all_experts_gives_the_bits_of_one_rank(fields: dict[str, Any]) -> None:
    model = SAMPLES / "stacked" / "gpt_oss"
    config = EngineConfig(str(model / "base"), threads=1, adapters=LIMITS)
    alone = load_runner(config)
    ranks = on_ranks(alone.spec, EngineConfig(**(config_fields(config) | fields)), base_of(alone))
    one, several = (SharedDriver(runner, 64, chunk=7) for runner in (alone, ranks))
    try:
        names = [hold(runner, "a", model / "adapter") for runner in (alone, ranks)]
        prompts, on = [[5, 6, 7, 8] * 4, [3, 4], [11, 12, 13]], [names[0], "", names[1]]
        found = one.answer(prompts, SPOKEN, adapters=on)
        assert several.answer(prompts, SPOKEN, adapters=on) == found
        assert several.logprobs == one.logprobs
        assert one.answer(prompts, SPOKEN) != found
    finally:
        ranks.leave()


def test_ranks_go_on_stepping_while_an_adapter_comes_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "PIECE_PARTS", 2)
    model = make(tmp_path / "model", "mixtral")
    config = EngineConfig(str(model), threads=1, adapters=LIMITS)
    alone = load_runner(config)
    ranks = on_ranks(alone.spec, EngineConfig(**(config_fields(config) | {"tp": 2})), base_of(alone))
    one, several = (SharedDriver(runner, 64, chunk=150) for runner in (alone, ranks))
    try:
        first = write(tmp_path / "first", model, ALL, rank=4, seed=2)
        second = read_here(
            AdapterPlace("second", str(write(tmp_path / "second", model, ALL, seed=3))), base_of(alone)
        )
        names = [hold(runner, "first", first) for runner in (alone, ranks)]
        host = adapters_of(ranks)
        assert host is not None
        pieces = 0
        for _ in host.holding(second.info.id, second.packed):
            wanted = one.answer(PROMPTS[1:], SPOKEN, adapters=[names[0], ""])
            assert several.answer(PROMPTS[1:], SPOKEN, adapters=[names[1], ""]) == wanted
            pieces += 1
        assert pieces > 5
        one_host = adapters_of(alone)
        assert one_host is not None
        one_host.hold(second.info.id, second.packed)
        same(one, several, [second.info.id, names[0], ""])
    finally:
        ranks.leave()


def test_adapters_that_found_no_descriptor_to_spare_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "PIECE_PARTS", 2)
    model = make(tmp_path / "model", "qwen2_mixed")
    config = EngineConfig(str(model), threads=1, adapters=LIMITS)
    alone = load_runner(config)
    ranks = on_ranks(alone.spec, EngineConfig(**(config_fields(config) | {"tp": 2})), base_of(alone))
    one, several = (SharedDriver(runner, 64, chunk=150) for runner in (alone, ranks))
    host, left = adapters_of(ranks), [2]

    def few(*note: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return notes.put(*note)

    try:
        assert host is not None
        folders = [write(tmp_path / str(seed), model, ALL, seed=seed) for seed in range(6)]
        names = [hold(ranks, "first", folders[0])]
        with monkeypatch.context() as scarce:
            scarce.setattr(adapters, "put", few)
            for number in range(1, 5):
                left[0] = 2
                with pytest.raises(OSError, match="Too many open files"):
                    hold(ranks, str(number), folders[number])
            scarce.setattr(notes, "put", few)
            host.drop(names[0])  # which nobody may be told of now
        names = [hold(ranks, str(seed), folders[seed]) for seed in (4, 5)]
        assert names == [hold(alone, str(seed), folders[seed]) for seed in (4, 5)]
        same(one, several, [*names, ""])
    finally:
        ranks.leave()


def test_an_adapter_that_a_process_has_read_is_shared_with_the_ranks_as_it_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "PIECE_PARTS", 3)
    model = make(tmp_path / "model", "qwen2_mixed")
    folder = write(tmp_path / "many", model, ALL, rank=16, seed=3)
    config = EngineConfig(str(model), threads=1, adapters=LIMITS)
    alone = load_runner(config)
    ranks = on_ranks(alone.spec, EngineConfig(**(config_fields(config) | {"tp": 2})), base_of(alone))
    one, several = (SharedDriver(runner, 64, chunk=150) for runner in (alone, ranks))
    told = list[str]()
    tell = ranks._followers.tell

    def noted(fd: int, size: int, patience_s: float) -> None:
        told.append(os.readlink(f"/proc/self/fd/{fd}"))
        tell(fd, size, patience_s)

    monkeypatch.setattr(ranks._followers, "tell", noted)
    reader = AdapterReader(base_of(alone))
    try:
        found = read_by(reader, AdapterPlace("many", str(folder)))
        for host in (adapters_of(alone), adapters_of(ranks)):
            assert host is not None
            host.hold(found.info.id, found.packed)
        assert len(told) > 3
        assert all("adapter-memory" in file for file in told), "the ranks map the reader's own memory"
        same(one, several, [found.info.id, "", found.info.id])
    finally:
        ranks.leave()
        reader.close()


def read_by(reader: AdapterReader, place: AdapterPlace) -> ReadAdapter:
    reading = reader.start(place)
    found: list[object] = [None]

    def has_read() -> bool:
        found[0] = reading.result()
        return found[0] is not None

    try:
        wait_for(has_read, 60.0, "the reading")
    finally:
        reading.close()
    assert isinstance(found[0], ReadAdapter)
    return found[0]


def test_a_piece_has_a_bounded_number_of_parts_and_bytes_or_one_part() -> None:
    sizes = [64 * (1 + at % 7) for at in range(3000)] + [3 << 20] + [64] * 2000
    parts, end = [], 0
    for number, size in enumerate(sizes):
        parts.append(PackedPart(Site(number, 0, 8, 8), 4, 1.0, True, end, end + size))
        end += 2 * size
    rows, found, at = PartTable.of(parts).rows, list[int](), 0
    for piece in adapters.pieces_of(rows, end, 1 << 18):
        assert len(piece.rows) <= PIECE_PARTS
        assert piece.end - piece.begin <= 1 << 18 or len(piece.rows) == 1
        assert (piece.begin, piece.last) == (at, len(found) + len(piece.rows) == len(sizes))
        found += piece.rows["number"].tolist()
        at = piece.end
    assert (found, at) == (list(range(len(sizes))), end)


def same(one: SharedDriver, several: SharedDriver, on: list[str]) -> None:
    found = []
    for sampling, names in ((SPOKEN, on), (READ, on), (SPOKEN, [])):
        found.append(one.answer(PROMPTS, sampling, adapters=names))
        assert several.answer(PROMPTS, sampling, adapters=names) == found[-1]
    assert found[0] != found[2], "the adapters change something"
    assert several.logprobs == one.logprobs
    assert several.read == one.read
    assert bytes(several.memory.view()) == bytes(one.memory.view())


def config_fields(config: EngineConfig) -> dict[str, Any]:
    return {field: getattr(config, field) for field in config.__struct_fields__} | {"rank_bound_s": 60.0}


def base_of(runner: Runner) -> Any:
    host = adapters_of(runner)
    assert host is not None
    return host.base
