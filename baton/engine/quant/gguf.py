"""Reads GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) in place of safetensors, parsed by
the ``gguf`` package: the kinds in ``ggml.blocks``, and plain F32, F16, BF16.

Knows nothing of packing. The directory holds config.json and one .gguf, or all parts of one. Blocks keep their
integers, codes and scales. GGUF stores the rows of Llama's q and k in pairs of neighbours for its rotary embedding;
they are put back into halves. A layer's experts are one tensor, (experts, rows, inputs).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.quant.ggml.blocks import KINDS
from baton.gguf_files.parts import GgufFiles, names_of
from baton.kernels.linear.codes import Codes
from baton.kernels.linear.integers import Integers, Part
from baton.protos.errors import CheckpointError
from baton.protos.json import Json

if TYPE_CHECKING:
    from gguf import ReaderTensor

WHOLE_BYTES = 256 << 20  # of a file, up to which its bytes are hashed at each start
Hashes = Callable[[Path, dict[str, tuple[int, int]]], dict[str, str]]  # of a file's ranges: first byte, size
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")  # whose names and values are known here
PAIRED = ("llama", "mistral", "mixtral")  # model types whose q and k rows GGUF reorders
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}


class GgufCheckpoint:
    """Reads a directory's GGUF file or parts, as a checkpoint and as the ``Reader`` of its quantized weights."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self._path = path
        self._paired = model.fields.get("model_type") in PAIRED
        self._heads = model.size("num_attention_heads")
        self._kv_heads = model.size("num_key_value_heads", self._heads)
        self._files = GgufFiles(path)
        self._tensors = self._files.tensors

    @classmethod
    def find(cls, directory: Path, model: ModelConfig) -> GgufCheckpoint | None:
        """Returns the directory's GGUF checkpoint; None if it has none, or has safetensors too. Raises
        CheckpointError for several models, or an unsupported model type.
        """
        found = sorted(directory.glob("*.gguf"))
        if not found or any(directory.glob("*.safetensors")):
            return None
        if not {path.name for path in found} <= set(names_of(found[0].name)):
            raise CheckpointError(
                f"{directory} holds {len(found)} .gguf files; keep the one that is meant", "model"
            )
        if model.model_type not in FAMILIES:
            text = f"is {model.model_type!r}; of GGUF files {', '.join(FAMILIES)} are read: use safetensors"
            raise model.error("model_type", text)
        return cls(found[0], model)

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors, in GGUF's spelling."""
        return self._tensors.keys()

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Raises CheckpointError, saying that the tensor is missing: ``read`` returns all tensors that exist."""
        raise CheckpointError(f"{self._path}: tensor {gguf_name(name)} (of {name}) is missing", "model")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | Part | None:
        """Returns the weight with Hugging Face's ``name``, plain or quantized; None if it is missing. Raises
        CheckpointError for another shape or an unsupported kind.
        """
        found = self._tensors.get(gguf_name(name))
        if found is None:
            return None
        expert = EXPERT.search(name)
        value = self._value(found, shape, None if expert is None else int(expert[1]))
        heads = {"q_proj": self._heads, "k_proj": self._kv_heads}.get(name.split(".")[-2])
        return _halves(value, heads) if heads and self._paired else value

    def _value(self, found: ReaderTensor, shape: tuple[int, ...], expert: int | None) -> Tensor | Part:
        """Returns a tensor's values, or those of one expert of it."""
        kind, size = found.tensor_type.name, tuple(int(d) for d in found.shape)[::-1]
        if kind not in PLAIN and kind not in KINDS:
            known = ", ".join((*PLAIN, *KINDS))
            raise self._error(found, f"is {kind}; known are {known}: convert the model to one of them")
        if (size if expert is None else size[1:]) != shape:
            raise self._error(found, f"has shape {size}, config.json asks for {shape}")
        if expert is not None and expert >= size[0]:
            raise self._error(found, f"has {size[0]} experts; config.json asks for more")
        raw = np.array(found.data if expert is None else found.data[expert], copy=True).view(np.uint8)
        values = torch.from_numpy(raw).view(-1)
        if kind in PLAIN:
            return values.view(PLAIN[kind]).view(shape)
        block, read = KINDS[kind]
        return read(values.view(-1, block), shape[0])

    def _error(self, found: ReaderTensor, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._files.home(found.name)}: tensor {found.name} {problem}", "model")

    def fingerprint(
        self, config: Json, hashes: Callable[[Path, dict[str, tuple[int, int]]], dict[str, str]]
    ) -> str:
        """Returns a hex SHA-256 over ``config`` and the files, of which every byte counts.

        Above 256 MiB a file's hash stands for it: ``hashes`` returns those of ranges (first byte, size) of a file.
        """
        digest = hashlib.sha256(msgspec.json.encode(config, order="sorted"))
        for path in self._files.paths:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            if size <= WHOLE_BYTES:
                digest.update(np.memmap(path, mode="r").data)
            else:
                digest.update(hashes(path, {"": (0, size)})[""].encode())
        return digest.hexdigest()


def gguf_name(name: str) -> str:
    """Returns GGUF's name of the tensor that Hugging Face checkpoints call ``name``."""
    layer, rest = "", name
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
        layer, rest = f"blk.{match[1]}.", match[2]
    place, _, kind = rest.rpartition(".")
    if expert := EXPERT.fullmatch(place):
        return f"{layer}{EXPERTS.get(expert[2], expert[2])}.{kind}"
    return f"{layer}{PLACES.get(place, place)}.{kind}"


def _halves(value: Tensor | Part, heads: int) -> Tensor | Part:
    """Returns ``value`` with each head's rows reordered from pairs (0 h/2 1 h/2+1 …) to halves."""

    def put(x: Tensor) -> Tensor:
        return x.reshape(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)

    if isinstance(value, Tensor):
        return put(value)
    if isinstance(value, Codes):
        return value._replace(codes=put(value.codes), scales=put(value.scales))
    assert isinstance(value, Integers)
    mins = None if value.mins is None else put(value.mins)
    return value._replace(q=put(value.q), scales=put(value.scales), mins=mins)
