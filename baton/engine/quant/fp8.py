"""Reads FP8 checkpoints as DeepSeek-V3 and Qwen3-FP8 write them (https://arxiv.org/abs/2412.19437, 3.3): e4m3 in
blocks.

Knows nothing of models. Per linear layer: weight float8_e4m3fn (n, k) and weight_scale_inv, float32, one number per
block of ``weight_block_size`` outputs x inputs (128 x 128), by which its weights are multiplied; without blocks one
number, or one per output. Activations are e4m3 if ``worker.activations`` asks for it, by ``input_scale`` or by
scales of their own (per token; with blocks per token and block's inputs); else bfloat16, which is finer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.program.config import ModelConfig
from baton.engine.quant import LEAST_GROUP, Reader, Tensors
from baton.kernels.linear.integers import ScaledFloats
from baton.protos.json import JsonValue

SCALES = ("weight_scale_inv", "weight_scale")
ROWS_SCALES = ("input_scale", "activation_scale")
ACTIVATIONS = ("dynamic", "static")
NAN = 127  # of the seven bits below the sign


def reader(model: ModelConfig, tensors: Tensors) -> Reader:
    """Returns a reader of the checkpoint's FP8 weights. Raises CheckpointError naming a setting that isn't
    supported.
    """
    settings = model.fields["quantization_config"]
    if settings.get("fmt", "e4m3") != "e4m3":
        raise model.error("quantization_config.fmt", f"is {settings['fmt']!r}; e4m3 is known")
    if settings.get("activation_scheme", "dynamic") not in ACTIVATIONS:
        known = " and ".join(ACTIVATIONS)
        found = settings["activation_scheme"]
        raise model.error("quantization_config.activation_scheme", f"is {found!r}; {known} are known")
    is_static = settings.get("activation_scheme", "dynamic") == "static"
    return Fp8Reader(tensors, _block(model, settings.get("weight_block_size")), is_static)


def _block(model: ModelConfig, found: JsonValue) -> tuple[int, int] | None:
    if found is None:
        return None
    whole = (
        isinstance(found, list | tuple)
        and len(found) == 2
        and all(type(size) is int and size > 0 for size in found)
    )
    if not whole or found[1] % LEAST_GROUP:
        text = f"is {found!r}; it must be two sizes, the second a multiple of {LEAST_GROUP}"
        raise model.error("quantization_config.weight_block_size", text)
    return found[0], found[1]


class Fp8Reader:
    """Reads a checkpoint's FP8 weights; implements ``Reader``.

    ``block`` is the (outputs, inputs) that share a scale, None for one scale per weight or row; ``is_static``:
    activations have a stored scale.
    """

    def __init__(self, tensors: Tensors, block: tuple[int, int] | None, is_static: bool = False) -> None:
        self._tensors, self._block, self._is_static = tensors, block, is_static
        self._names = set(tensors.names())

    def read(self, name: str, shape: tuple[int, ...]) -> ScaledFloats | None:
        """Returns the weight ``name`` of ``shape`` (n, k); None if it isn't quantized. Raises CheckpointError if
        its tensors don't fit.
        """
        base = name.removesuffix("weight")
        scales = self._first(base, SCALES)
        if scales is None:
            return None
        values = self._tensors.tensor(name)
        if values.dtype != torch.float8_e4m3fn or tuple(values.shape) != shape:
            problem = f"is {values.dtype} {tuple(values.shape)}, config.json asks for float8_e4m3fn {shape}"
            raise self._tensors.error(name, problem)
        given = self._first(base, ROWS_SCALES) or f"{base}{ROWS_SCALES[0]}"
        rows = rows_scale(self._tensors, given) if self._is_static else 0.0
        return scaled(self._tensors, name, values, scales, self._block)._replace(rows=rows)

    def _first(self, base: str, parts: tuple[str, ...]) -> str | None:
        """Returns the first tensor of the layer ``base`` that the checkpoint has, by any of these names."""
        return next((f"{base}{part}" for part in parts if f"{base}{part}" in self._names), None)


def rows_scale(tensors: Tensors, name: str) -> float:
    """Returns the number that activations are divided by before they are rounded to e4m3: the greatest in tensor
    ``name``. Raises CheckpointError unless all are above 0.
    """
    found = tensors.tensor(name).float()
    if not bool((torch.isfinite(found) & (found > 0)).all()) or not found.numel():
        text = f"is {found.flatten()[:3].tolist()}; a scale of activations is a number above 0: get the model again"
        raise tensors.error(name, text)
    return float(found.max())


def scaled(tensors: Tensors, name: str, values: Tensor, scales: str, block: tuple[int, int] | None) -> ScaledFloats:
    """Returns the e4m3 weight ``values`` (n, k) named ``name`` with the scales in tensor ``scales``: one number,
    one per row, or one per ``block``. Raises CheckpointError.
    """
    if bool((values.view(torch.uint8) & NAN == NAN).any()):
        raise tensors.error(name, "holds NaN; it is damaged, quantize the model again")
    found, (n, k) = tensors.tensor(scales).float(), values.shape
    if block is None:
        if found.numel() not in (1, n):
            raise tensors.error(
                scales, f"has shape {tuple(found.shape)}; one number or {n} are known without blocks"
            )
        return ScaledFloats(values, found.reshape(-1, 1).expand(n, 1).contiguous())
    asked = tuple(-(-size // of) for size, of in zip((n, k), block, strict=True))
    if tuple(found.shape) != asked:
        text = (
            f"has shape {tuple(found.shape)}; blocks of {block[0]} x {block[1]} of a {n} x {k} weight are {asked}"
        )
        remedy = "weight_block_size in config.json must be what the model was quantized with"
        raise tensors.error(scales, f"{text}: {remedy}")
    return ScaledFloats(values, found.repeat_interleave(block[0], 0)[:n].contiguous(), block[1])
