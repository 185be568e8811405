"""PEFT adapters as they are published, and everything that is refused, by the file and the tensor or field."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.reading import read_here
from baton.protos.adapter_id import is_adapter_id
from baton.protos.channel import AdapterPlace
from baton.protos.errors import AdapterChanged, AdapterRefused
from tests.engine.adapters.adapter_files import write
from tests.engine.adapters.reading_rig import BASE, EMBED, SITES, Q, V, adapter, model, plain, read

__all__ = ["adapter", "model"]


FIRST = f"base_model.model.{Q}.lora_A.weight"
Change = Callable[[dict[str, Tensor]], None]


def test_matrices_come_out_as_they_were_written(adapter: Path) -> None:
    found, tensors = read(adapter), load_file(adapter / "adapter_model.safetensors")
    matrices = plain(found)
    for (number, first), name in {(1, 0): Q, (1, 112): V, (2, 0): "lm_head"}.items():
        a, b = matrices[number, first]
        assert np.array_equal(a, tensors[f"base_model.model.{name}.lora_A.weight"].numpy())
        assert np.array_equal(b, tensors[f"base_model.model.{name}.lora_B.weight"].numpy())
    a, b = matrices[0, 0]
    assert np.array_equal(a.T, tensors[f"base_model.model.{EMBED}.lora_embedding_A"].numpy())
    assert np.array_equal(b, tensors[f"base_model.model.{EMBED}.lora_embedding_B"].numpy())
    assert found.info.targets == ("embed_tokens", "lm_head", "q_proj", "v_proj")
    assert (found.info.rank, found.info.bytes) == (4, len(found.packed.memory))
    assert all(part.scale == 3.0 for part in found.packed.parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_numbers_keep_their_values(tmp_path: Path, model: Path, dtype: torch.dtype) -> None:
    directory = write(tmp_path / "a", model, ("q_proj",), dtype=dtype)
    wanted = load_file(directory / "adapter_model.safetensors")[FIRST].float().numpy()
    (part,), packed = (found := read(directory)).packed.parts, found.packed
    assert part.narrow is (dtype == torch.bfloat16)
    raw = packed.first(part)
    assert np.array_equal((raw.astype(np.uint32) << 16).view(np.float32) if part.narrow else raw, wanted)


def test_an_engine_in_bf16_rounds_as_torch_does(tmp_path: Path, model: Path) -> None:
    directory = write(tmp_path / "a", model, ("q_proj",))
    found = read(directory, AdapterBase(SITES, 16, 1 << 20, narrow=True))
    wanted = load_file(directory / "adapter_model.safetensors")[FIRST].bfloat16().view(torch.int16).numpy()
    assert np.array_equal(found.packed.first(found.packed.parts[0]).view(np.int16), wanted)
    assert found.info.id == read(directory).info.id  # the content, not how an engine keeps it


def test_the_digest_is_of_the_content(tmp_path: Path, model: Path, adapter: Path) -> None:
    same = write(
        tmp_path / "same", model, ("q_proj", "v_proj", "embed_tokens", "lm_head"), rank=4, lora_dropout=0.1
    )
    found = read(adapter).info.id
    assert is_adapter_id(found)
    assert found.startswith("sql@")
    assert read(same).info.id == found
    for change in ({"seed": 9}, {"alpha": 13.0}, {"use_rslora": True}):
        fields: dict[str, Any] = {"rank": 4, **change}
        other = write(tmp_path / "other", model, ("q_proj", "v_proj", "embed_tokens", "lm_head"), **fields)
        assert read(other).info.id != found
    digest = found.partition("@")[2]
    assert read(adapter, digest=digest).info.id == found
    with pytest.raises(AdapterChanged, match="were replaced"):
        read(tmp_path / "other", digest=digest)


def test_patterns_give_modules_ranks_and_scales_of_their_own(tmp_path: Path, model: Path) -> None:
    def shrink(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if "v_proj" in name:
                tensors[name] = (tensors[name][:2] if "lora_A" in name else tensors[name][:, :2]).contiguous()

    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {r"layers\.\d+\.self_attn\.v_proj": 5}}
    found = read(write(tmp_path / "a", model, ("q_proj", "v_proj"), rank=4, change=shrink, **patterns))
    assert {part.site.first: (part.rank, part.scale) for part in found.packed.parts} == {0: (4, 3.0), 112: (2, 2.5)}


REFUSED_SETTINGS = [
    ({"use_dora": True}, "use_dora", "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save", "whole layers"),
    ({"bias": "all"}, "bias", "only none"),
    ({"peft_type": "IA3"}, "peft_type", "LORA"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights", "changed"),
    ({"use_newest_idea": True}, "use_newest_idea", "nothing here knows"),
    ({"r": 0}, "r", "whole number"),
    ({"lora_alpha": None}, "lora_alpha", "number"),
    ({"lora_alpha": 10**400}, "lora_alpha", "number"),
    ({"rank_pattern": {"(": 4}}, "rank_pattern", "no pattern"),
    ({"r": 64}, "r", "16 at most"),
]


@pytest.mark.parametrize(("settings", "param", "text"), REFUSED_SETTINGS, ids=lambda value: str(value)[:30])
def test_what_isnt_applied_is_refused_by_its_field(
    tmp_path: Path, model: Path, settings: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(AdapterRefused, match=text) as refused:
        read(write(tmp_path / "a", model, ("q_proj",), **settings))
    assert refused.value.param == param
    assert "adapter_config.json" in refused.value.message


def _set(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def _drop(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors[FIRST][1, 2] = torch.nan


EXPERT = "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight"
REFUSED_TENSORS: list[tuple[Change, str]] = [
    (_set(FIRST, torch.zeros(8, 47)), r"q_proj.lora_A.weight has shape \(8, 47\).*\(8, 48\)"),
    (_set("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", torch.zeros(8, 48)), "another base"),
    (_set(EXPERT, torch.zeros(8, 48)), "expert"),
    (_drop(FIRST), "without a lora_A"),
    (_set("base_model.model.model.norm.weight", torch.zeros(100, 48)), "none of LoRA's"),
    (_set("base_model.model.lm_head.base_layer.weight", torch.zeros(100, 48)), "can't be compared"),
    (_set(FIRST, torch.zeros(8, 48, dtype=torch.int8)), "is of I8"),
    (_set(f"base_model.model.{Q}.lora_magnitude_vector", torch.zeros(80)), "adapters are matrices"),
    (_set("base_model.model.lm_head.base_layer.bias", torch.zeros(100)), "target other layers"),
    (_set(f"base_model.model.{Q}.lora_B.bias", torch.zeros(80)), "is a bias; .* train it without"),
    (_set(f"base_model.model.{EMBED}.lora_embedding_A", torch.zeros(8, 101)), "without a lora_B"),
    (_nan, "NaN"),
    (_set(f"{Q}.lora_A.weight", torch.zeros(8, 48)), "one of them is meant"),
]


@pytest.mark.parametrize(("change", "text"), REFUSED_TENSORS, ids=[text for _, text in REFUSED_TENSORS])
def test_a_tensor_that_doesnt_fit_is_refused_by_its_name(
    tmp_path: Path, model: Path, change: Change, text: str
) -> None:
    with pytest.raises(AdapterRefused, match=text) as refused:
        read(write(tmp_path / "a", model, ("q_proj",), change=change))
    assert "adapter_model.safetensors: tensor" in refused.value.message


def test_another_vocabulary_is_refused(tmp_path: Path, model: Path) -> None:
    def grow(tensors: dict[str, Tensor]) -> None:
        tensors[f"base_model.model.{EMBED}.lora_embedding_A"] = torch.zeros(8, 101)

    with pytest.raises(AdapterRefused, match="has 101 tokens; the model's vocabulary has 100"):
        read(write(tmp_path / "a", model, ("embed_tokens",), change=grow))


@pytest.mark.parametrize("spelt", [EMBED, EMBED.replace("model.", "model.language_model.")])
def test_a_copy_of_the_bases_table_changes_nothing_and_another_table_is_refused(
    tmp_path: Path, model: Path, spelt: str
) -> None:
    table = torch.randn(100, 48)
    save_file({f"{spelt}.weight": table.bfloat16()}, model / "model.safetensors")
    base, name = AdapterBase(SITES, 16, 1 << 20, model=str(model)), f"base_model.model.{spelt}.base_layer.weight"
    same = _set(name, table.bfloat16().float())
    bare, copied = (write(tmp_path / "a", model, ("embed_tokens",), change=change) for change in (None, same))
    assert read(copied, base).info.id == read(bare, base).info.id
    for other, text in ((table, "isn't the base's table"), (table[:99], "another base")):
        with pytest.raises(AdapterRefused, match=text):
            read(write(tmp_path / "b", model, ("embed_tokens",), change=_set(name, other.contiguous())), base)


def test_copies_alone_are_no_adapter(tmp_path: Path, model: Path) -> None:
    def only_a_copy(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors[f"base_model.model.{EMBED}.base_layer.weight"] = torch.zeros(100, 48)

    with pytest.raises(AdapterRefused, match="and no adapter"):
        read(write(tmp_path / "a", model, ("embed_tokens",), change=only_a_copy))


def _header(length: int, text: bytes) -> bytes:
    return struct.pack("<Q", length) + text


DAMAGED = [
    (b"", "no safetensors file"),
    (b"PK\x03\x04 a zip of pickles", "no safetensors file"),
    (_header(1 << 40, b"{}"), "no safetensors file"),
    (_header(2, b"[]"), "no JSON object"),
    (_header(2, b"{}"), "names 0 tensors"),
    (_header(17, b'{"a": {"b": "c"}}'), "tensor a is of None"),
]


@pytest.mark.parametrize(("raw", "text"), DAMAGED, ids=[text for _, text in DAMAGED])
def test_a_file_that_is_no_safetensors_is_refused(adapter: Path, raw: bytes, text: str) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(raw)
    with pytest.raises(AdapterRefused, match=text):
        read(adapter)


def test_a_file_that_was_cut_or_names_too_many_tensors_is_refused_by_its_header(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.adapters.reader.ANY_SITES", 4)
    path = adapter / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(AdapterRefused, match="it is cut or padded"):
        read(adapter)
    entry = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
    text = json.dumps({f"t{i}": entry for i in range(100)}).encode()
    path.write_bytes(_header(len(text), text) + bytes(4))
    with pytest.raises(AdapterRefused, match="names 100 tensors; this model has places for 16"):
        read(adapter)


def test_an_adapter_above_the_bound_is_refused_before_a_tensor_is_read(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "baton.engine.adapters.tensors.TensorFile.piece", lambda *_: pytest.fail("a tensor was read")
    )
    with pytest.raises(AdapterRefused, match=r"adapters\.max_bytes"):
        read(adapter, AdapterBase(SITES, 16, 1000))


@pytest.mark.parametrize("path", ["/etc", "../adapter", "a/../../adapter", "", "."])
def test_a_path_that_leads_out_of_the_root_is_refused(tmp_path: Path, adapter: Path, path: str) -> None:
    with pytest.raises(AdapterRefused, match="adapter path"):
        read_here(AdapterPlace("sql", path, str(tmp_path)), BASE)


def test_beneath_a_root_no_link_is_followed(tmp_path: Path, adapter: Path) -> None:
    root = tmp_path / "root"
    (root / "team").mkdir(parents=True)
    (root / "team" / "linked").symlink_to(adapter)
    copy = root / "team" / "copy"
    copy.mkdir()
    (copy / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    (copy / "adapter_model.safetensors").symlink_to(adapter / "adapter_model.safetensors")
    for path in ("team/linked", "team/copy"):
        with pytest.raises(AdapterRefused, match="links"):
            read_here(AdapterPlace("sql", path, str(root)), BASE)
    with pytest.raises(AdapterRefused, match=r"'team/absent': No such file or directory$"):
        read_here(AdapterPlace("sql", "team/absent", str(root)), BASE)
    (copy / "adapter_model.safetensors").unlink()
    os.link(adapter / "adapter_model.safetensors", copy / "adapter_model.safetensors")
    assert read_here(AdapterPlace("sql", "team/copy", str(root)), BASE).info.path == "team/copy"
    assert read(root / "team" / "linked").info.id  # an operator's own path may be a link
