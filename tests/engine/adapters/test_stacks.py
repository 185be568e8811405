"""Adapters on parameters of all experts: which parameter a pair stands beside, or what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.reading import read_here
from baton.engine.adapters.table import ReadAdapter
from baton.engine.program.sites import Site, StackedSite
from baton.protos.channel import AdapterPlace
from baton.protos.errors import AdapterRefused

AT = "model.layers.0.mlp.experts"
GATES, DOWN = StackedSite(3, 5, 24, 24), StackedSite(4, 5, 24, 12)  # gates and ups of 12 each are square
BASE = AdapterBase({}, 16, 1 << 20, stacked={f"{AT}.gate_up_proj": GATES, f"{AT}.down_proj": DOWN})
Change = Callable[[dict[str, Tensor]], None]


def saved(at: Path, rank: int = 2, change: Change | None = None, **settings: Any) -> Path:
    """Both pairs as PEFT nests them."""
    tensors: dict[str, Tensor] = {}
    for end, site in ((".base_layer", GATES), ("", DOWN)):
        tensors[f"base_model.model.{AT}{end}.lora_A.weight"] = torch.randn(site.experts * rank, site.inputs)
        tensors[f"base_model.model.{AT}{end}.lora_B.weight"] = torch.randn(site.outputs, site.experts * rank)
    if change is not None:
        change(tensors)
    at.mkdir(parents=True)
    save_file(tensors, at / "adapter_model.safetensors")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_parameters": parameters} | settings
    (at / "adapter_config.json").write_text(json.dumps(config))
    return at


def read(directory: Path, base: AdapterBase = BASE) -> ReadAdapter:
    return read_here(AdapterPlace("a", str(directory)), base)


def test_each_expert_gets_a_part_of_its_own(tmp_path: Path) -> None:
    found = read(saved(tmp_path / "a", alpha_pattern={"down_proj": 6}))
    assert found.info.targets == ("down_proj", "gate_up_proj")
    parts = found.packed.parts
    assert {(part.site.number, part.site.first, part.scale) for part in parts} == {
        *((3, 24 * e, 2.0) for e in range(5)), *((4, 24 * e, 3.0) for e in range(5))
    }  # fmt: skip
    assert found.info.bytes == len(found.packed.memory)


def only(end: str) -> Change:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if end not in name]:
            del tensors[name]

    return drop


def one_expert_less(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name] = (tensors[name][:-2] if "lora_A" in name else tensors[name][:, :-2]).contiguous()


def both_down(tensors: dict[str, Tensor]) -> None:
    for half in "AB":
        tensors[f"base_model.model.{AT}.base_layer.lora_{half}.weight"] = tensors[
            f"base_model.model.{AT}.lora_{half}.weight"
        ].clone()


REFUSED = [
    (one_expert_less, {}, r"experts\.lora_A\.weight has shape \(8, 12\).* ask for \(10, 24\) and \(24, 10\)"),
    (both_down, {}, r"down_proj's, as .* is; one of them is meant"),
    (only("base_layer"), {}, r"is square for each expert.*target gate_up_proj and down_proj both"),
    (lambda tensors: tensors.pop(f"base_model.model.{AT}.lora_B.weight"), {}, r"lora_A without a lora_B"),
    (None, {"rank_pattern": {"down_proj": 3}}, r"this model's experts and its rank ask for .*\(15, 12\)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "settings", "said"), REFUSED)
def test_what_fits_no_parameter_or_several_is_refused_by_tensor(
    tmp_path: Path, change: Change | None, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(AdapterRefused, match=said):
        read(saved(tmp_path / "a", change=change, **settings))


def test_a_rank_above_the_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=r"down_proj has rank 17; 16 at most|gate_up_proj has rank 17"):
        read(saved(tmp_path / "a", rank=17))


def test_an_engine_that_knows_no_layers_takes_them_with_all_their_columns(tmp_path: Path) -> None:
    assert {part.rank for part in read(saved(tmp_path / "a"), AdapterBase({}, 16, 1 << 20)).packed.parts} == {10}


def test_a_base_without_such_experts_refuses_them_by_name(tmp_path: Path) -> None:
    base = AdapterBase({"model.q_proj": Site(0, 0, 8, 8)}, 16, 1 << 20)
    with pytest.raises(AdapterRefused, match=r"mlp\.experts.*, where adapters aren't applied"):
        read(saved(tmp_path / "a"), base)
