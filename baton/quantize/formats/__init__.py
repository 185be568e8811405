"""Checkpoint formats, one module each: ``settings`` for config.json, and ``tensors`` of a quantized linear layer.

Knows nothing of how weights were rounded. A module is named after its ``quant_method``. ``mxfp4`` takes all experts
of a layer at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from baton.protos.json import Json
from baton.quantize.quantized_weight import QuantizedWeight
from baton.quantize.schemes import Recipe


class Format(Protocol):
    """The functions of a module of this package."""

    def settings(self, recipe: Recipe, ignored: list[str]) -> Json:
        """Returns the ``quantization_config`` of config.json; ``ignored`` are the modules that stay unquantized."""

    def tensors(self, rounded: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns a linear layer's tensors by the part of their name after the layer's; ``dtype`` is the plain
        weight's.
        """


def format_of(recipe: Recipe) -> Format:
    """Returns the module for ``recipe.format``; ``recipe`` must be checked."""
    found: Format = import_module(f"{__name__}.{recipe.format.replace('-', '_')}")  # type: ignore[assignment]
    return found
