"""Small random adapters in PEFT's layout beside a checkpoint, and the checkpoint that has one merged in.

Knows nothing of engines. Names and shapes are those that PEFT itself writes, which ``tests/data/adapters`` holds
a sample of.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EMBEDDINGS, HEAD = ("embed_tokens", "embeddings"), "lm_head"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
LINEAR = (*ATTENTION, *LATENT, "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
RECURRENT = ("in_proj", "out_proj", *(f"in_proj_{end}" for end in ("a", "b", "ba", "qkv", "qkvz", "z")))
SHARED = ("shared_expert_gate", "input_linear", "output_linear")
EXPERTS = ".experts."  # among targets: layers of experts too, in their checkpoint's names
MIXTRAL = ("w1", "w2", "w3")
EVERYWHERE = (*LINEAR, *RECURRENT, *SHARED, "gate", "router", "layer", *EMBEDDINGS, HEAD)


def checkpoint(model: Path) -> dict[str, Tensor]:
    return {name: one for file in sorted(model.glob("*.safetensors")) for name, one in load_file(file).items()}


def table(weights: dict[str, Tensor]) -> Tensor:
    """Returns the embedding's weight."""
    return next(one for name, one in weights.items() if name.split(".")[-2] in EMBEDDINGS)


def modules_of(model: Path, targets: tuple[str, ...]) -> list[str]:
    """The checkpoint's modules whose last part is among ``targets``; experts are left out unless EXPERTS is."""
    weights = checkpoint(model).items()
    names = [name.removesuffix(".weight") for name, one in weights if name.endswith(".weight") and one.dim() == 2]
    found = [name for name in names if name.rpartition(".")[2] in targets]
    found = [name for name in found if EXPERTS in targets or EXPERTS not in name]
    return sorted({*found, *([HEAD] if HEAD in targets else [])})


def write(
    directory: Path,
    model: Path,
    targets: tuple[str, ...] = LINEAR,
    rank: int = 8,
    alpha: float = 12.0,
    seed: int = 1,
    size: float = 0.15,
    dtype: torch.dtype = torch.float32,
    change: Callable[[dict[str, Tensor]], None] | None = None,
    **settings: Any,
) -> Path:
    """Writes an adapter of ``rank`` beside ``targets``; ``settings`` go to its config, ``change`` edits tensors."""
    weights, generator = checkpoint(model), torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module in modules_of(model, targets):
        n, k = (weights[f"{module}.weight"] if f"{module}.weight" in weights else table(weights)).shape
        looked_up = module.rpartition(".")[2] in EMBEDDINGS
        a = torch.randn(rank, n if looked_up else k, generator=generator) * size
        b = torch.randn(k if looked_up else n, rank, generator=generator) * size
        prefix, ends = f"base_model.model.{module}", ("lora_A.weight", "lora_B.weight")
        for end, matrix in zip(
            ("lora_embedding_A", "lora_embedding_B") if looked_up else ends, (a, b), strict=True
        ):
            tensors[f"{prefix}.{end}"] = matrix.to(dtype).contiguous()
    if change is not None:
        change(tensors)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config | settings))
    return directory


def merge(directory: Path, model: Path, adapter: Path) -> Path:
    """Writes the checkpoint ``model`` with ``adapter``'s products in its weights; a tied head becomes its own."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    weights, config = checkpoint(model), json.loads((adapter / "adapter_config.json").read_text())
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    model_config = json.loads((model / "config.json").read_text())
    weights.setdefault("lm_head.weight", table(weights).clone())
    model_config["tie_word_embeddings"] = False
    tensors = {name: tensor.double() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    for name, a in tensors.items():
        if ".lora_A." in name or name.endswith("lora_embedding_A"):
            looked_up = name.endswith("lora_embedding_A")
            end = "lora_embedding_A" if looked_up else "lora_A.weight"
            module = name.removeprefix("base_model.model.").removesuffix(f".{end}")
            product = tensors[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")] @ a * scale
            added = weights[f"{module}.weight"].double() + (product.T if looked_up else product)
            weights[f"{module}.weight"] = added.float()
    for file in (*directory.glob("*.safetensors"), *directory.glob("*.index.json")):
        file.unlink()
    save_file({n: w.contiguous() for n, w in weights.items()}, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(model_config))
    return directory
