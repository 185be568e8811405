"""Reads bitsandbytes checkpoints: NF4 and FP4 (https://arxiv.org/abs/2305.14314), LLM.int8
(https://arxiv.org/abs/2208.07339).

Knows nothing of models. 4 bits, per linear layer: weight uint8, two codes a byte (the first one high), row after
row; weight.absmax per ``blocksize`` weights, float32 or, quantized again, uint8 into weight.nested_quant_map times
weight.nested_absmax per 256 of them, plus an offset; weight.quant_map, the codes' values; weight.quant_state…, JSON
as bytes. 8 bits: weight int8 and SCB, each row's absmax. Inputs from a magnitude of ``llm_int8_threshold`` on are
multiplied in float, not in int8 (outliers.h).
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.quant import LEAST_GROUP, Reader, Tensors
from baton.kernels.linear.codes import Codes, nibbles
from baton.kernels.linear.integers import Integers

KINDS = ("nf4", "fp4")
STATE = "quant_state.bitsandbytes__"


def reader(model: ModelConfig, tensors: Tensors) -> Reader:
    """Returns a reader of the checkpoint's bitsandbytes weights. Raises CheckpointError naming a setting that isn't
    supported.
    """
    settings = model.fields["quantization_config"]
    if not (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        raise model.error("quantization_config", "has neither load_in_4bit nor load_in_8bit; one must be true")
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    if settings.get("load_in_4bit") and kind not in KINDS:
        raise model.error("quantization_config.bnb_4bit_quant_type", f"is {kind!r}; nf4 and fp4 are known")
    outliers = settings.get("llm_int8_threshold", 6.0)
    if not isinstance(outliers, int | float) or outliers < 0:
        raise model.error("quantization_config.llm_int8_threshold", f"is {outliers!r}; it must be 0 or more")
    return BitsAndBytesReader(tensors, float(outliers))


class QuantState(msgspec.Struct, frozen=True):
    """Holds the quant_state of a 4-bit weight."""

    quant_type: str  # "nf4" or "fp4"
    blocksize: int  # weights per absmax
    shape: tuple[int, int]  # of the weight (n, k)
    nested_blocksize: int = 0  # absmaxes per nested_absmax; 0: they aren't quantized
    nested_offset: float = 0.0  # added to each absmax that was quantized


class BitsAndBytesReader:
    """Reads a checkpoint's bitsandbytes weights; implements ``Reader``. ``outliers`` is its
    ``llm_int8_threshold``.
    """

    def __init__(self, tensors: Tensors, outliers: float) -> None:
        self._tensors, self._names, self._outliers = tensors, set(tensors.names()), outliers

    def read(self, name: str, shape: tuple[int, ...]) -> Codes | Integers | Tensor | None:
        """Returns the weight ``name`` of ``shape`` (n, k); None if it isn't quantized. Raises CheckpointError if
        its tensors don't fit. One of 4 bits whose rows are shorter than any group is returned as its values.
        """
        if f"{name}.quant_map" in self._names:
            return self._codes(name, shape)
        scales = f"{name.removesuffix('.weight')}.SCB"
        return self._integers(name, scales, shape) if scales in self._names else None

    def _integers(self, name: str, scales: str, shape: tuple[int, ...]) -> Integers:
        q, rows = self._tensors.tensor(name), self._tensors.tensor(scales)
        self._require(
            q.dtype == torch.int8 and tuple(q.shape) == shape,
            name,
            f"is {q.dtype} {tuple(q.shape)}, not int8 {shape}",
        )
        self._require(tuple(rows.shape) == shape[:1], scales, f"has shape {tuple(rows.shape)}, not {shape[:1]}")
        return Integers(q, 8, 0, rows.float()[:, None] / 127, outliers=self._outliers)

    def _codes(self, name: str, shape: tuple[int, ...]) -> Codes | Tensor:
        state, packed = self._state(name), self._tensors.tensor(name)
        count = math.prod(shape)
        self._require(state.shape == shape, name, f"is packed for {state.shape}, not {shape}")
        size = -(-count // 2)
        self._require(packed.numel() * packed.itemsize == size, name, f"holds {packed.numel()} bytes, not {size}")
        group = math.gcd(state.blocksize, shape[1])
        if group % LEAST_GROUP and shape[1] >= LEAST_GROUP:
            text = f"has blocks of {state.blocksize} over rows of {shape[1]}, whose common divisor is {group}"
            raise self._tensors.error(
                name, f"{text}; quantize with a blocksize that shares a multiple of 16 with the rows"
            )
        absmax, table = self._absmax(name, state), self._part(name, "quant_map", 16)
        self._require(
            len(absmax) * state.blocksize >= count, f"{name}.absmax", f"has {len(absmax)} scales, too few"
        )
        packed = packed.contiguous().view(torch.uint8)
        if shape[1] < LEAST_GROUP:
            codes = nibbles(packed.view(1, -1), first_high=True).flatten()[:count]
            return (table[codes.long()] * absmax.repeat_interleave(state.blocksize)[:count]).view(shape)
        scales = absmax.repeat_interleave(state.blocksize // group)[: count // group].view(shape[0], -1)
        return Codes(nibbles(packed.view(shape[0], -1), first_high=True), table, group, scales)

    def _absmax(self, name: str, state: QuantState) -> Tensor:
        """Returns each block's absmax, float32."""
        absmax = self._tensors.tensor(f"{name}.absmax")
        if absmax.dtype != torch.uint8:
            return absmax.float()
        self._require(
            state.nested_blocksize > 0,
            f"{name}.absmax",
            "is quantized, but its quant_state has no nested_blocksize",
        )
        outer = self._part(name, "nested_absmax", -(-len(absmax) // state.nested_blocksize))
        outer = outer.repeat_interleave(state.nested_blocksize)[: len(absmax)]
        return self._part(name, "nested_quant_map", 256)[absmax.int()] * outer + state.nested_offset

    def _part(self, name: str, part: str, size: int) -> Tensor:
        found = self._tensors.tensor(f"{name}.{part}").float().flatten()
        self._require(found.numel() == size, f"{name}.{part}", f"has {found.numel()} numbers, not {size}")
        return found

    def _state(self, name: str) -> QuantState:
        found = next((other for other in self._names if other.startswith(f"{name}.{STATE}")), None)
        self._require(
            found is not None, f"{name}.{STATE}…", "is missing; save the model by transformers' save_pretrained"
        )
        try:
            state = msgspec.json.decode(bytes(self._tensors.tensor(str(found)).tolist()), type=QuantState)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            problem = f"can't be read as a quant_state ({error}); save the model by save_pretrained again"
            raise self._tensors.error(str(found), problem) from error
        self._require(
            state.quant_type in KINDS, str(found), f"says quant_type {state.quant_type!r}; nf4 and fp4 are known"
        )
        self._require(state.blocksize > 0, str(found), f"says blocksize {state.blocksize}")
        return state

    def _require(self, holds: bool, name: str, problem: str) -> None:
        if not holds:
            raise self._tensors.error(name, problem)
