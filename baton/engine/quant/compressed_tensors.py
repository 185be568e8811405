"""Reads llm-compressor's checkpoints, of compressed-tensors (https://github.com/vllm-project/compressed-tensors).

Knows nothing of models. Per linear layer one of

    weight int8 with weight_scale per tensor, channel or group and, where not symmetric, weight_zero_point
    weight float8_e4m3fn with weight_scale per tensor, channel, group or block
    weight_packed int32 (n, k / per), integers of 4 or 8 bits, with weight_shape and scales as of int8; with
    weight_g_idx (k,), each input's group, where groups follow GPTQ's order (actorder "group")
    weight_packed uint8 (n, k / 2), E2M1 by weight_scale: uint8 powers of two per 32 inputs (MXFP4), or
    float8_e4m3fn per 16, over weight_global_scale (NVFP4)

Each layer's tensors determine how it is read, so that layers may differ. Tensors of all experts
(``program/stacked.py``) have one dimension more, and so have their scales. Activations are rounded per token at run
time; those multiplied by fp8 weights to bfloat16, or as ``input_activations`` says if ``worker.activations`` asks
for e4m3.
"""

from __future__ import annotations

import copy
from collections.abc import Set

import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.program.stacked import part_of
from baton.engine.quant import LEAST_GROUP, ExpertTensors, Reader, Tensors, declared_group, packed_words
from baton.engine.quant.fp8 import rows_scale, scaled
from baton.engine.quant.gptq import input_order, unpack
from baton.kernels.linear.codes import Codes, e2m1, nibbles
from baton.kernels.linear.integers import Integers, ScaledFloats
from baton.protos.json import Json

PLAIN = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
FORMATS = (*PLAIN, "mxfp4-pack-quantized", "nvfp4-pack-quantized")
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
ACT_ORDERS = (None, False, "weight", "static", True, "group", "dynamic")  # the last three ask for a g_idx
KINDS = (("int", 8), ("int", 4), ("float", 8), ("float", 4))  # types and bits of weights that can be read
BIAS, NAN = 127, 255  # of E8M0 (OCP Microscaling Formats v1.0, 5.4.1)


def reader(model: ModelConfig, tensors: Tensors) -> Reader:
    """Returns a reader of the checkpoint's weights. Raises CheckpointError naming a setting that isn't
    supported.
    """
    settings = model.fields.get("quantization_config") or model.fields["compression_config"]
    if settings.get("format") not in FORMATS:
        known = ", ".join(FORMATS)
        raise model.error("quantization_config.format", f"is {settings.get('format')!r}; known are {known}")
    if (settings.get("transform_config") or {}).get("config_groups"):
        text = "has rotations of activations, which aren't known here: use a checkpoint without transforms"
        raise model.error("quantization_config.transform_config", text)
    parts = settings.get("config_groups", {})
    if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
        raise model.error("quantization_config.config_groups", f"is {parts!r:.60}; an object of groups is known")
    groups = [_scheme(model, part, "weights") for part in parts.values()]
    for weights in groups:
        _require_known(model, weights)
    blocks = {tuple(weights["block_structure"]) for weights in groups if weights.get("block_structure")}
    if len(blocks) > 1:
        raise model.error("quantization_config", f"has blocks of {sorted(blocks)}; one size is known")
    activations = [_scheme(model, part, "input_activations") for part in parts.values()]
    are_e4m3 = any((found.get("type"), found.get("num_bits")) == ("float", 8) for found in activations)
    sizes = {declared_group(model, "group_size", found.get("group_size")) for found in groups}
    zeros = bool(groups) and all(found.get("symmetric") is False for found in groups)
    return CompressedReader(tensors, next(iter(blocks), None), are_e4m3, sizes - {0}, zeros)


def _scheme(model: ModelConfig, part: Json, name: str) -> Json:
    """Returns the scheme ``name`` of a group, an empty one where it has none."""
    found = part.get(name) or {}
    if not isinstance(found, dict):
        raise model.error(f"quantization_config.config_groups.{name}", f"is {found!r:.60}; an object is known")
    return found


def _require_known(model: ModelConfig, weights: Json) -> None:
    kind = weights.get("type"), weights.get("num_bits")
    if kind not in KINDS:
        text = f"has {kind[1]}-bit {kind[0]} weights; int4, int8, fp8 and fp4 are known"
        raise model.error("quantization_config", text)
    if weights.get("strategy") not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise model.error("quantization_config", f"has strategy {weights.get('strategy')!r}; known are {known}")
    block = weights.get("block_structure")
    if block is not None and not _is_block(block):
        raise model.error("quantization_config", f"has block_structure {block!r}; use [outputs, inputs]")
    if weights.get("actorder") not in ACT_ORDERS:
        text = f"has actorder {weights['actorder']!r}; none, weight and group are known"
        raise model.error("quantization_config", text)


def _is_block(found: object) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(isinstance(size, int) and size > 0 for size in found)


class CompressedReader:
    """Reads a checkpoint's compressed-tensors weights; implements ``Reader``.

    ``block`` is the (outputs, inputs) that share a scale of fp8, None for other strategies; ``are_e4m3``:
    activations are meant to be rounded to e4m3 too; ``sizes`` are the declared group sizes, and ``zeros`` says
    whether all integers have zero points.
    """

    def __init__(
        self,
        tensors: Tensors,
        block: tuple[int, int] | None,
        are_e4m3: bool = False,
        sizes: Set[int] = frozenset(),
        zeros: bool = False,
    ) -> None:
        self._tensors, self._block, self._are_e4m3 = tensors, block, are_e4m3
        self._sizes, self._has_zeros = sizes, zeros
        self._names = set(tensors.names())

    def read(self, name: str, shape: tuple[int, ...]) -> Integers | ScaledFloats | Codes | None:
        """Returns the weight ``name`` of ``shape`` (n, k); None if it isn't quantized. Raises CheckpointError if
        its tensors don't fit.
        """
        name, part = part_of(name)
        if f"{name}_scale" not in self._names:
            return None
        own = self
        if part is not None:
            own = copy.copy(self)
            own._tensors = ExpertTensors(self._tensors, part)
        return own._stored(name, shape)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Integers | ScaledFloats | Codes:
        if f"{name}_packed" in self._names:
            packed = self._tensors.tensor(f"{name}_packed")
            return (
                self._fp4(name, packed, shape) if packed.dtype == torch.uint8 else self._packed(name, packed, shape)
            )
        values = self._tensors.tensor(name)
        if tuple(values.shape) != shape:
            raise self._tensors.error(name, f"has shape {tuple(values.shape)}, config.json asks for {shape}")
        if values.dtype == torch.float8_e4m3fn:
            return self._fp8(name, values)
        if values.dtype != torch.int8:
            raise self._tensors.error(name, f"is {values.dtype}; int8 and float8_e4m3fn are known")
        return self._integers(name, values, 8)

    def _fp8(self, name: str, values: Tensor) -> ScaledFloats:
        given = f"{name.removesuffix('weight')}input_scale"
        static = self._are_e4m3 and given in self._names
        rows = rows_scale(self._tensors, given) if static else 0.0 if self._are_e4m3 else None
        return self._fp8_weight(name, values)._replace(rows=rows)

    def _fp8_weight(self, name: str, values: Tensor) -> ScaledFloats:
        groups = self._tensors.tensor(f"{name}_scale").shape
        if self._block is not None or len(groups) < 2 or groups[1] == 1:
            return scaled(self._tensors, name, values, f"{name}_scale", self._block)
        scale, group = self._scales(name, values.shape)
        return ScaledFloats(values, scale, group)

    def _fp4(self, name: str, packed: Tensor, shape: tuple[int, ...]) -> Codes:
        if tuple(packed.shape) != (shape[0], shape[1] // 2):
            found = packed.shape[0], 2 * packed.shape[1]
            raise self._tensors.error(f"{name}_packed", f"is packed for {found}, config.json asks for {shape}")
        scale, group = self._scales(name, shape)
        rows = self._rows(name, shape[0])
        if not group:
            scale, group = scale.expand(-1, -(-shape[1] // LEAST_GROUP)).contiguous(), LEAST_GROUP
        return e2m1(nibbles(packed), group, scale, rows)

    def _rows(self, name: str, n: int) -> Tensor | None:
        """Returns what NVFP4's scales are over, (n,), of a number per tensor; None of MXFP4's powers of two."""
        whole = f"{name}_global_scale"
        if whole not in self._names:
            if self._tensors.tensor(f"{name}_scale").dtype == torch.float8_e4m3fn:
                raise self._tensors.error(f"{name}_scale", f"has no {whole} beside it; get the model again")
            return None
        found = self._tensors.tensor(whole).float()
        if found.numel() != 1:
            raise self._tensors.error(whole, f"has shape {tuple(found.shape)}; one number is known")
        return 1 / found.reshape(1).expand(n)

    def _packed(self, name: str, packed: Tensor, shape: tuple[int, ...]) -> Integers:
        packed = packed_words(self._tensors, f"{name}_packed")
        for bits in (4, 8):
            if tuple(packed.shape) == (shape[0], -(-shape[1] * bits // 32)):
                q = unpack(packed, bits)[:, : shape[1]] - (1 << (bits - 1))
                return self._integers(name, q.to(torch.int8), bits)
        text = f"has shape {tuple(packed.shape)}, which is {shape} by neither 4 nor 8 bits"
        raise self._tensors.error(f"{name}_packed", text)

    def _scales(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, int]:
        """Returns the scales (n, groups) float32, and the number of inputs per group, 0 if a row has one scale."""
        found = self._tensors.tensor(f"{name}_scale")
        if found.dtype == torch.uint8:
            if bool((found == NAN).any()):
                raise self._tensors.error(f"{name}_scale", "holds NaN; it is damaged, quantize the model again")
            found = torch.exp2(found.float() - BIAS)
        groups = found.shape[1] if found.dim() == 2 else 1
        if not groups or found.numel() not in (groups, shape[0] * groups):
            text = f"has shape {tuple(found.shape)}; a weight {shape} has a scale or a row of them for each output"
            raise self._tensors.error(f"{name}_scale", text)
        group = 0 if groups == 1 else -(-shape[1] // groups)
        if group % LEAST_GROUP or (group and -(-shape[1] // group) != groups):
            text = f"has {groups} groups for {shape[1]} inputs"
            remedy = f"groups must divide them and be multiples of {LEAST_GROUP}"
            raise self._tensors.error(f"{name}_scale", f"{text}; {remedy}")
        if group and self._sizes and group not in self._sizes:
            text = f"has groups of {group} of {shape[1]} inputs; quantization_config declares {sorted(self._sizes)}"
            raise self._tensors.error(f"{name}_scale", f"{text}: give the size that the model was quantized with")
        return found.float().reshape(-1, groups).expand(shape[0], -1).contiguous(), group

    def _integers(self, name: str, q: Tensor, bits: int) -> Integers:
        scale, group = self._scales(name, q.shape)
        order = input_order(self._tensors, f"{name}_g_idx", q.shape[1], scale.shape[1])
        q = q if order is None else q[:, order]
        if f"{name}_zero_point" not in self._names:
            if self._has_zeros:
                text = (
                    f"has no {name}_zero_point beside it, though its weights aren't symmetric; get the model again"
                )
                raise self._tensors.error(f"{name}_scale", text)
            return Integers(q, bits, group, scale, order=order)
        zero = self._tensors.tensor(f"{name}_zero_point")
        if zero.dtype == torch.int32 and zero.shape[0] != scale.shape[0]:
            zero = unpack(zero.T, bits).T - (1 << (bits - 1))
        if zero.numel() not in (scale.shape[1], scale.numel()):
            raise self._tensors.error(
                f"{name}_zero_point", f"has shape {tuple(zero.shape)}, not that of its scales"
            )
        zero = zero.float().reshape(-1, scale.shape[1]).expand_as(scale)
        return Integers(q, bits, group, scale, scale * zero if bool(zero.any()) else None, order=order)
