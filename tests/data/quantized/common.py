"""Holds what the scripts of this folder share: the plain model that they quantize, what a library says of it, the
record of versions.

Run in an environment of the libraries' own (versions.json of each folder has them), never by the tests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

HERE = Path(__file__).parent
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
WATCHED = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
ROUNDED = "expected_fp8.safetensors"  # logits where activations are e4m3 as well
KEPT = ("config.json", "model.safetensors", "expected.safetensors", ROUNDED, "versions.json")


def base(directory: Path, **changes: Any) -> Path:
    """A random Llama in bfloat16, the same each time."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).bfloat16().save_pretrained(directory)
    return directory


def mixtral(directory: Path, **changes: Any) -> Path:
    """A random Mixtral of four experts in bfloat16, the same each time."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    MixtralForCausalLM(MixtralConfig(**(sizes | changes))).bfloat16().save_pretrained(directory)
    return directory


def prompts() -> Tensor:
    """(4, 24) token ids."""
    return torch.randint(0, SIZES["vocab_size"], (4, 24), generator=torch.Generator().manual_seed(1))


def record(
    directory: Path,
    model: nn.Module,
    dense: Callable[[nn.Module], Tensor],
    libraries: tuple[str, ...],
    watched: tuple[str, ...] = WATCHED,
) -> None:
    """Writes what the library makes of its checkpoint: watched layers by ``dense``, each prompt's logits."""
    with torch.no_grad():
        logits = model(prompts()).logits[:, -1].float().contiguous()
    values = {f"{name}.weight": dense(model.get_submodule(name)).float() for name in watched}
    save_file(
        {"logits": logits, **{k: v.contiguous().clone() for k, v in values.items()}},
        directory / "expected.safetensors",
    )
    found = {name: version(name) for name in ("torch", "transformers", *libraries)}
    (directory / "versions.json").write_text(json.dumps(found, indent=1) + "\n")
    for path in directory.iterdir():
        if path.name not in KEPT and not path.match("model*.safetensors*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def reloaded(directory: Path, **settings: Any) -> nn.Module:
    """The checkpoint as transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(directory, device_map="cpu", **settings).eval()
