"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) in place of safetensors: Q4_0, Q8_0, Q4_K,
Q6_K, and plain F32, F16, BF16. Parsed by the ``gguf`` package.

Knows nothing of packing. The directory holds config.json and one .gguf. Blocks keep their integers and scales:
Q4_0 and Q8_0 are scale x q per 32, Q6_K per 16; Q4_K is scale x q - min per 32. GGUF stores llama's q and k rows in
pairs of neighbours for its rotary embedding; they are put back into halves.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.kernels.linear.integers import Integers
from baton.protos.errors import CheckpointError

FULL_HASH_BYTES, SAMPLE_BYTES, SAMPLES = 256 << 20, 1 << 20, 32
PAIRED = ("llama", "mistral")  # model types whose q and k rows GGUF reorders
PLACES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufCheckpoint:
    """A directory's one GGUF file, read as a checkpoint and as its own ``Reader``."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self._path = path
        self._paired = model.fields.get("model_type") in PAIRED
        self._heads = model.size("num_attention_heads")
        self._kv_heads = model.size("num_key_value_heads", self._heads)
        self._tensors = {tensor.name: tensor for tensor in _open(path).tensors}

    @classmethod
    def find(cls, directory: Path, model: ModelConfig) -> GgufCheckpoint | None:
        """The directory's GGUF, None where it has none or has safetensors too. Raises CheckpointError."""
        found = sorted(directory.glob("*.gguf"))
        if not found or any(directory.glob("*.safetensors")):
            return None
        if len(found) > 1:
            raise CheckpointError(
                f"{directory} holds {len(found)} .gguf files; keep the one that is meant", "model"
            )
        return cls(found[0], model)

    def names(self) -> Iterable[str]:
        """Every tensor's name, in GGUF's spelling."""
        return self._tensors.keys()

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A missing one: ``read`` gives all there are. Raises CheckpointError."""
        raise CheckpointError(f"{self._path}: tensor {gguf_name(name)} (of {name}) is missing", "model")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | Integers | None:
        """The tensor of ``name`` as config.json's architecture spells it."""
        found = self._tensors.get(gguf_name(name))
        if found is None:
            return None
        kind = found.tensor_type.name
        if kind not in READERS:
            known = ", ".join(READERS)
            raise CheckpointError(f"{self._path}: {found.name} is {kind}; known are {known}", "model")
        value = READERS[kind](found, shape)
        heads = {"q_proj": self._heads, "k_proj": self._kv_heads}.get(name.split(".")[-2])
        return _halves(value, heads) if heads and self._paired else value

    def fingerprint(self, config: dict[str, Any]) -> str:
        """Hex SHA-256 over config and the file: all of it up to 256 MiB, above that 32 pieces of 1 MiB."""
        digest = hashlib.sha256(msgspec.json.encode(config, order="sorted"))
        whole = np.memmap(self._path, mode="r")
        digest.update(len(whole).to_bytes(8, "little"))
        step = len(whole) if len(whole) <= FULL_HASH_BYTES else len(whole) // SAMPLES
        for at in range(0, len(whole), step):
            digest.update(whole[at : at + (step if step == len(whole) else SAMPLE_BYTES)].data)
        return digest.hexdigest()


def gguf_name(name: str) -> str:
    """A Hugging Face tensor's name in GGUF's spelling."""
    layer, rest = "", name
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
        layer, rest = f"blk.{match[1]}.", match[2]
    place, _, kind = rest.rpartition(".")
    return f"{layer}{PLACES.get(place, place)}.{kind}"


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader

        return GGUFReader(path)
    except ImportError:
        raise CheckpointError(f"{path}: reading GGUF needs the gguf package: pip install gguf", "model") from None
    except Exception as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is damaged or no GGUF: {error}", "model"
        ) from error


def _halves(value: Tensor | Integers, heads: int) -> Tensor | Integers:
    """Rows of each head from pairs (0 h/2 1 h/2+1 …) to halves."""

    def put(x: Tensor) -> Tensor:
        return x.reshape(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)

    if isinstance(value, Tensor):
        return put(value)
    mins = None if value.mins is None else put(value.mins)
    return value._replace(q=put(value.q), scales=put(value.scales), mins=mins)


def _blocks(found: Any, size: int) -> Tensor:
    """(blocks, bytes of one)."""
    return torch.from_numpy(np.array(found.data, copy=True).view(np.uint8)).view(-1, size)


def _half(raw: Tensor) -> Tensor:
    """(blocks, 2 x count bytes) of float16 -> (blocks, count) float32."""
    return raw.contiguous().view(torch.float16).float()


def _plain(dtype: torch.dtype) -> Callable[[Any, tuple[int, ...]], Tensor]:
    def read(found: Any, shape: tuple[int, ...]) -> Tensor:
        raw = np.array(found.data, copy=True).view(np.uint8)
        return torch.from_numpy(raw).view(-1).view(dtype).view(tuple(int(d) for d in found.shape)[::-1])

    return read


def _q4_0(found: Any, shape: tuple[int, ...]) -> Integers:
    blocks, n = _blocks(found, 18), shape[0]
    q = torch.cat((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), 1).to(torch.int8) - 8
    return Integers(q.view(n, -1), 4, 32, _half(blocks[:, :2]).view(n, -1))


def _q8_0(found: Any, shape: tuple[int, ...]) -> Integers:
    blocks, n = _blocks(found, 34), shape[0]
    return Integers(
        blocks[:, 2:].contiguous().view(torch.int8).view(n, -1), 8, 32, _half(blocks[:, :2]).view(n, -1)
    )


def _q4_k(found: Any, shape: tuple[int, ...]) -> Integers:
    """256 inputs: d, dmin, 8 scales and 8 mins of 6 bits, nibbles in four runs of 64 (low half first)."""
    blocks, n = _blocks(found, 144), shape[0]
    d, dmin = _half(blocks[:, :4]).split(1, 1)
    packed = blocks[:, 4:16].view(-1, 3, 4)
    low, high, both = packed[:, 0], packed[:, 1], packed[:, 2]
    scale = torch.cat((low & 63, (both & 15) | ((low >> 6) << 4)), 1)
    minimum = torch.cat((high & 63, (both >> 4) | ((high >> 6) << 4)), 1)
    runs = blocks[:, 16:].view(-1, 4, 1, 32)
    q = torch.cat((runs & 15, runs >> 4), 2).view(-1, 256).to(torch.int8) - 8
    scales = (d * scale).view(n, -1)
    return Integers(q.view(n, -1), 4, 32, scales, (dmin * minimum).view(n, -1) - 8 * scales)


def _q6_k(found: Any, shape: tuple[int, ...]) -> Integers:
    """256 inputs in two halves of 128: low nibbles (64 bytes), two high bits (32 bytes); then 16 scales, d."""
    blocks, n = _blocks(found, 210), shape[0]
    low, high = blocks[:, :128].view(-1, 2, 2, 32), blocks[:, 128:192].view(-1, 2, 1, 32)
    nibbles = torch.cat((low & 15, low >> 4), 2)  # rows of 32: inputs 0, 32, 64, 96 of the half
    tops = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 2)
    q = (nibbles | (tops << 4)).reshape(-1, 256).to(torch.int8) - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Integers(q.view(n, -1), 8, 16, scales.view(n, -1))


READERS: dict[str, Callable[[Any, tuple[int, ...]], Tensor | Integers]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
