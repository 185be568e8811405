"""Tiny checkpoints in the forms that quantized ones come in, packed by loops that share nothing with the readers.

Knows nothing of the readers. ``write(base, directory, form)`` makes a quantized checkpoint of ``base``
and, beside it, its plain twin: the same values in float32, read the ordinary way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conformance.checkpoints import make

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, Tensor]


class Form(NamedTuple):
    """``pack(name, weight)`` gives the stored tensors (under the layer's name) and what they stand for."""

    settings: dict[str, Any]
    pack: Callable[[Tensor], tuple[Tensors, Tensor]]


def base(directory: Path) -> Path:
    """Makes the model that ``write`` starts from."""
    return make(directory, "qwen2", hidden_size=128, intermediate_size=256, head_dim=32)


def experts_base(directory: Path) -> Path:
    """A model with experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32}
    return make(directory, "qwen3_moe", num_experts=3, num_experts_per_tok=2, vocab_size=128, **sizes)


def gguf_base(directory: Path) -> Path:
    """Makes the model that ``write_gguf`` starts from: a llama, whose q and k rows GGUF reorders."""
    size = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make(directory, "llama2", head_dim=64, vocab_size=128, **size)


def write(base: Path, directory: Path, form: Form) -> tuple[Path, Path]:
    """The quantized checkpoint and its twin."""
    plain, coded = directory / "plain", directory / "coded"
    shutil.copytree(base, plain)
    shutil.copytree(base, coded)
    tensors = load_file(plain / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in list(tensors.items()):
        if name.endswith("proj.weight"):
            parts, tensors[name] = form.pack(tensor)
            stored |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, coded / "model.safetensors")
    config = json.loads((coded / "config.json").read_text()) | {"quantization_config": form.settings}
    (coded / "config.json").write_text(json.dumps(config))
    return coded, plain


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q from 0 up, zeros, scales float16, all (n, groups, …), and the values."""
    n, k = weight.shape
    high = (1 << bits) - 1
    parts = weight.view(n, k // group, group)
    if symmetric:
        scale = (parts.abs().amax(-1) / (high // 2)).half().float()
        zero = torch.full_like(scale, (high + 1) // 2)
    else:
        low, top = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = ((top - low) / high).half().float()
        zero = (-low / scale).round()
    q = (parts / scale[..., None] + zero[..., None]).round().clamp(0, high)
    return q.int().view(n, k), zero.int(), scale.half(), ((q - zero[..., None]) * scale[..., None]).view(n, k)


def packed(columns: np.ndarray, bits: int, order: tuple[int, ...]) -> Tensor:
    """(rows, columns) of small integers -> (rows, columns x bits / 32); ``order[i]`` sits in the i-th bits."""
    if 32 % bits:
        return packed_across(columns, bits)
    per = 32 // bits
    out = np.zeros((columns.shape[0], columns.shape[1] // per), np.uint32)
    for at in range(out.shape[1]):
        for place in range(per):
            out[:, at] |= columns[:, at * per + order[place]].astype(np.uint32) << (bits * place)
    return torch.from_numpy(out.view(np.int32))


def packed_across(columns: np.ndarray, bits: int) -> Tensor:
    """Packs the same of integers that go on in the next int32, as AutoGPTQ packs 3 bits."""
    out = np.zeros((columns.shape[0], columns.shape[1] * bits // 32), np.uint32)
    for row, values in enumerate(columns.tolist()):
        whole = sum(value << (bits * place) for place, value in enumerate(values))
        out[row] = [(whole >> (32 * word)) & 0xFFFFFFFF for word in range(out.shape[1])]
    return torch.from_numpy(out.view(np.int32))


def gptq(
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    order: bool = False,
    version: int = 1,
    alike: bool = True,
) -> Form:
    """Returns the form with AutoGPTQ's layout."""
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "sym": symmetric}
    settings["checkpoint_format"] = "gptq_v2" if version == 2 else "gptq"
    plain, seeds = tuple(range(32 // bits)), torch.Generator()

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        k = weight.shape[1]
        seeds.manual_seed(
            k if alike else seeds.initial_seed() + 1
        )  # alike: layers of the same inputs have one order
        turn = torch.randperm(k, generator=seeds) if order else torch.arange(k)
        q, zero, scale, value = rounded(weight[:, turn], bits, group, symmetric)
        back = torch.argsort(turn)
        stored_zero = zero.T.numpy() - (1 if version == 1 else 0)
        parts = {
            "qweight": packed(q[:, back].numpy(), bits, plain).T,
            "qzeros": packed(stored_zero & ((1 << bits) - 1), bits, plain),
            "scales": scale.T,
            "g_idx": (back // group).int(),
        }
        return parts, value[:, back]

    return Form(settings, pack)


def awq(group: int = 32) -> Form:
    """Returns the form with AutoAWQ's GEMM layout."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        q, zero, scale, value = rounded(weight, 4, group, symmetric=False)
        coded = {"qweight": packed(q.T.numpy(), 4, AWQ_ORDER), "qzeros": packed(zero.T.numpy(), 4, AWQ_ORDER)}
        return coded | {"scales": scale.T}, value

    return Form({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}, pack)


def compressed(kind: str, strategy: str, group: int = 32, order: bool = False) -> Form:
    """Returns a compressed-tensors form; ``kind`` is int8, int8_asymmetric, fp8 or int4. Groups of int4 follow an
    ``order`` if asked, which layers of the same inputs share.
    """
    weights = {"num_bits": 4 if kind == "int4" else 8, "type": "float" if kind == "fp8" else "int"}
    weights |= {"strategy": strategy, "symmetric": kind != "int8_asymmetric", "group_size": group}
    weights |= {"actorder": "group"} if order else {}
    form = {"fp8": "float-quantized", "int4": "pack-quantized"}.get(kind, "int-quantized")
    settings = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    settings["config_groups"] = {"group_0": {"weights": weights, "targets": ["Linear"]}}

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        if kind == "fp8":
            scale = weight.abs().amax(1, keepdim=True) / 448
            scale = scale.amax().view(1) if strategy == "tensor" else scale
            coded = (weight / scale).to(torch.float8_e4m3fn)
            return {"weight": coded, "weight_scale": scale}, coded.float() * scale
        width = group if strategy == "group" else weight.shape[1]
        bits, symmetric = (4, True) if kind == "int4" else (8, kind == "int8")
        k = weight.shape[1]
        turn = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if order else torch.arange(k)
        q, zero, scale, value = rounded(weight[:, turn], bits, width, symmetric)
        half, back = 1 << (bits - 1), torch.argsort(turn)
        if kind == "int4":
            coded = packed(q[:, back].numpy(), 4, tuple(range(8)))
            parts = {"weight_packed": coded, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
            return parts | ({"weight_g_idx": (back // group).int()} if order else {}), value[:, back]
        parts = {"weight": (q - half).to(torch.int8), "weight_scale": scale}
        return parts if symmetric else parts | {"weight_zero_point": (zero - half).to(torch.int8)}, value

    return Form(settings, pack)


def fp8_blocks(rows: int = 48, group: int = 64) -> Form:
    """DeepSeek's layout, with smaller blocks, which leave a part of the last rows."""
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        value, coded = torch.empty_like(weight), torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        inverse = torch.empty(-(-len(weight) // rows), -(-weight.shape[1] // group))
        for i in range(inverse.shape[0]):
            for j in range(inverse.shape[1]):
                at = slice(rows * i, rows * (i + 1)), slice(group * j, group * (j + 1))
                inverse[i, j] = weight[at].abs().max() / 448
                coded[at] = (weight[at] / inverse[i, j]).to(torch.float8_e4m3fn)
                value[at] = coded[at].float() * inverse[i, j]
        return {"weight": coded, "weight_scale_inv": inverse}, value

    return Form(settings | {"weight_block_size": [rows, group]}, pack)


def write_gguf(base: Path, directory: Path, kind: str) -> tuple[Path, Path]:
    """A llama with its matrices in ``kind`` (random blocks), its twin holding what the gguf package reads there."""
    plain, coded = directory / "plain", directory / "coded"
    shutil.copytree(base, plain)
    coded.mkdir()
    shutil.copy(plain / "config.json", coded)
    tensors = load_file(plain / "model.safetensors")
    writer = gguf.GGUFWriter(coded / "model.gguf", "llama")
    rng = np.random.default_rng(0)
    for name, tensor in list(tensors.items()):
        spelled, value = gguf_spelling(name), tensor.float().numpy()
        if name.endswith("proj.weight"):
            blocks = random_blocks(rng, kind, *value.shape)
            value = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(spelled, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
            tensors[name] = torch.from_numpy(value if heads is None else unpaired(value, heads)).contiguous()
        else:
            writer.add_tensor(spelled, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, plain / "model.safetensors")
    return coded, plain


def random_blocks(rng: np.random.Generator, kind: str, n: int, k: int) -> np.ndarray:
    """(n, bytes of a row): random integers, sane scales (float16, where the block has them)."""
    items, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (n * k // items, size), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(kind, (0,))
    halves = (0, 2) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else halves
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(115, 120, len(blocks))
    for at in halves:
        scale = (rng.random(len(blocks)) * 0.002 + 0.0005).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(n, -1)


def unpaired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows in the order that llama.cpp's converter would be given, found by applying its reordering to
    row numbers.
    """
    rows = np.arange(len(weight))
    given = (
        rows.reshape(heads, 2, len(rows) // heads // 2).swapaxes(1, 2).reshape(-1)
    )  # GGUF row i was row given[i]
    out = np.empty_like(weight)
    out[given] = weight
    return out


def gguf_spelling(name: str) -> str:
    """Returns a tensor's name by the gguf package's own table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None
    return found
