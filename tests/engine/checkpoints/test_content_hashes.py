"""Hashes of large checkpoint files: which changes they see, and when the cache is believed."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.checkpoints import content_hashes as own
from baton.engine.checkpoints import safetensors
from baton.engine.checkpoints.content_hashes import content_hashes
from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.program.config import ModelConfig
from baton.engine.quant import gguf
from baton.engine.quant.gguf import GgufCheckpoint
from baton.protos.errors import CheckpointError

GGUF = Path(__file__).parents[2] / "data" / "quantized" / "gguf_k_quants"
SPANS = {"a": (0, 5000), "b": (5000, 0), "c": (5000, 3001)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has files of a few kilobytes taken for large ones, of several pieces that take several reads."""
    monkeypatch.setattr(own, "PIECE_BYTES", 1000)
    monkeypatch.setattr(own, "READ_BYTES", 300)
    monkeypatch.setattr(safetensors, "WHOLE_BYTES", 0)
    monkeypatch.setattr(gguf, "WHOLE_BYTES", 0)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a file that was just written taken for one that has long been as it is."""
    monkeypatch.setattr(own, "SETTLED_S", -1.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 32)
    return path


def changed(path: Path, at: int) -> None:
    """Flips a bit of byte ``at`` in place, and gives the file back the time that it had."""
    before = path.stat()
    with path.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def hashes(directory: Path) -> Callable[[Path, dict[str, tuple[int, int]]], dict[str, str]]:
    return partial(content_hashes, directory=str(directory))


def records(directory: Path) -> list[Path]:
    return sorted((directory / "fingerprints").glob("*.json"))


def unread(path: Path, spans: object) -> object:
    raise AssertionError(f"{path} should have come from the cache")


@pytest.mark.parametrize("at", [0, 299, 300, 999, 1000, 2499, 4999])
def test_every_byte_of_a_range_counts_and_of_no_other(file: Path, tmp_path: Path, at: int) -> None:
    before = content_hashes(file, SPANS, str(tmp_path))
    changed(file, at)
    after = content_hashes(file, SPANS, str(tmp_path))
    assert before["a"] != after["a"]
    assert (before["b"], before["c"]) == (after["b"], after["c"])


def written(directory: Path, tensors: dict[str, torch.Tensor], file: str = safetensors.SINGLE) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / file)
    return directory


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{i}": torch.randn(70, 30, generator=generator) for i in range(3)}


def test_a_fingerprint_of_large_files_sees_one_number_changed_anywhere(tmp_path: Path) -> None:
    plain = Checkpoint(written(tmp_path / "plain", tensors())).fingerprint({}, hashes(tmp_path))
    for at in range(0, 70, 3):
        others = tensors()
        others["layer.1"][at, 7] += 1
        directory = written(tmp_path / "other", others)
        assert Checkpoint(directory).fingerprint({}, hashes(tmp_path)) != plain
    same = written(tmp_path / "other", tensors())
    assert Checkpoint(same).fingerprint({}, hashes(tmp_path)) == plain


def test_large_shards_and_one_large_file_are_the_same_model(tmp_path: Path) -> None:
    one, places = written(tmp_path / "one", tensors()), {}
    for name, tensor in tensors().items():
        places[name] = f"model-{name}.safetensors"
        many = written(tmp_path / "many", {name: tensor}, places[name])
    (many / safetensors.INDEX).write_text(json.dumps({"weight_map": places}))
    first, second = (Checkpoint(path).fingerprint({}, hashes(tmp_path)) for path in (one, many))
    assert first == second


def test_a_gguf_fingerprint_sees_any_byte(tmp_path: Path) -> None:
    model = ModelConfig.read(GGUF)
    path = tmp_path / "model.gguf"
    path.write_bytes((GGUF / "model.gguf").read_bytes())
    seen = {GgufCheckpoint(path, model).fingerprint({}, hashes(tmp_path))}
    size = path.stat().st_size
    for back in (1, 1000, 5555):
        changed(path, size - back)
        seen.add(GgufCheckpoint(path, model).fingerprint({}, hashes(tmp_path)))
    assert len(seen) == 4


@pytest.mark.usefixtures("settled")
def test_a_file_that_is_as_it_was_is_not_read_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = content_hashes(file, SPANS, str(tmp_path))
    monkeypatch.setattr(own, "_hashed", unread)
    assert content_hashes(file, SPANS, str(tmp_path)) == first


@pytest.mark.usefixtures("settled")
def test_a_file_is_not_read_again_once_its_volume_was_mounted_anew(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device's number may be another after that; nothing else of the file is."""
    first = content_hashes(file, SPANS, str(tmp_path))
    stat = Path.stat

    def elsewhere(path: Path, **more: bool) -> os.stat_result:
        fields, named = cast(tuple[tuple[int, ...], dict[str, int]], stat(path, **more).__reduce__()[1])
        return os.stat_result((*fields[:2], fields[2] + 1, *fields[3:]), named)

    monkeypatch.setattr(Path, "stat", elsewhere)
    monkeypatch.setattr(own, "_hashed", unread)
    assert content_hashes(file, SPANS, str(tmp_path)) == first


@pytest.mark.usefixtures("settled")
def test_a_change_in_place_is_seen_though_size_and_time_are_put_back(file: Path, tmp_path: Path) -> None:
    before = content_hashes(file, SPANS, str(tmp_path))
    time = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == time:  # within a tick of the system's clock both would look alike
        changed(file, 1234)
        changed(file, 1234)
    changed(file, 1234)
    assert content_hashes(file, SPANS, str(tmp_path))["a"] != before["a"]


def test_hashes_of_a_file_that_has_just_changed_are_not_cached(file: Path, tmp_path: Path) -> None:
    content_hashes(file, SPANS, str(tmp_path))
    assert not records(tmp_path)


@pytest.mark.usefixtures("settled")
def test_a_damaged_record_is_made_again(file: Path, tmp_path: Path) -> None:
    first = content_hashes(file, SPANS, str(tmp_path))
    records(tmp_path)[0].write_bytes(b'{"path": 1')
    assert content_hashes(file, SPANS, str(tmp_path)) == first
    assert b"identity" in records(tmp_path)[0].read_bytes()


def test_without_a_cache_hashes_are_the_same(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the cache's folder would be")
    assert content_hashes(file, SPANS, str(tmp_path / "taken")) == content_hashes(file, SPANS, str(tmp_path))


def test_a_file_that_is_cut_off_is_refused_by_name(file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{file} .*is truncated: it ends at byte 8192"):
        content_hashes(file, {"a": (8000, 500)}, str(tmp_path))


def test_a_file_that_changes_while_it_is_read_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = own._piece_digest

    def and_grow(opened: int, piece: own.Span, kept: threading.local) -> bytes:
        found = digest(opened, piece, kept)
        with file.open("ab") as grown:
            grown.write(b"more")
        return found

    monkeypatch.setattr(own, "_piece_digest", and_grow)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        content_hashes(file, SPANS, str(tmp_path))


def test_two_dtypes_of_the_same_bytes_are_two_models(tmp_path: Path) -> None:
    ones = torch.ones(4, dtype=torch.int16)
    one, two = written(tmp_path / "one", {"w": ones}), written(tmp_path / "two", {"w": ones.view(torch.bfloat16)})
    assert Checkpoint(one).fingerprint({}, hashes(tmp_path)) != Checkpoint(two).fingerprint({}, hashes(tmp_path))


def test_a_shard_that_is_replaced_once_it_is_mapped_is_refused_by_name(tmp_path: Path) -> None:
    directory = written(tmp_path / "model", tensors())
    checkpoint = Checkpoint(directory)
    written(directory, {name: tensor + 1 for name, tensor in tensors().items()}, "new")
    (directory / "new").replace(directory / safetensors.SINGLE)
    with pytest.raises(CheckpointError, match=f"{safetensors.SINGLE} changed while it was read"):
        checkpoint.fingerprint({}, hashes(tmp_path))


def test_files_that_are_mapped_again_are_those_that_were_mapped_first(tmp_path: Path) -> None:
    directory = written(tmp_path / "model", tensors())
    checkpoint = Checkpoint(directory)
    checkpoint.tensor("layer.1")
    written(directory, {name: tensor + 1 for name, tensor in tensors().items()}, "new")
    (directory / "new").replace(directory / safetensors.SINGLE)
    with pytest.raises(CheckpointError, match=f"{safetensors.SINGLE} changed while it was read"):
        checkpoint.release()


@pytest.mark.usefixtures("settled")
def test_a_full_disk_has_a_file_hashed_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, calls = own._hashed, []

    def counted(path: Path, spans: Mapping[str, own.Span]) -> tuple[dict[str, str], own.FileIdentity]:
        calls.append(path)
        return hashed(path, spans)

    def full(record: Path, found: own.FileHashes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(own, "_hashed", counted)
    monkeypatch.setattr(own, "_write", full)
    assert content_hashes(file, SPANS, str(tmp_path)).keys() == SPANS.keys()
    assert calls == [file]


@pytest.mark.usefixtures("settled")
def test_a_good_record_is_believed_without_a_lock(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = content_hashes(file, SPANS, str(tmp_path))

    def read_only(path: Path, what: str = "") -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(own, "locked", read_only)
    monkeypatch.setattr(own, "_hashed", unread)
    assert content_hashes(file, SPANS, str(tmp_path)) == first


@pytest.mark.usefixtures("settled")
def test_a_record_of_another_version_is_made_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = content_hashes(file, SPANS, str(tmp_path))
    monkeypatch.setattr(own, "VERSION", own.VERSION + 1)
    monkeypatch.setattr(own, "PIECE_BYTES", 500)
    assert content_hashes(file, SPANS, str(tmp_path)) != first
