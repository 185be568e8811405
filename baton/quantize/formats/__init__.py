"""One file per form of checkpoint: ``settings(recipe, ignored)`` of config.json, ``tensors(rounded)`` of a layer.

Named as ``quant_method``. Knows nothing of how weights were rounded.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from baton.quantize.rounded import Rounded
from baton.quantize.schemes import Recipe


class Format(Protocol):
    """A form of checkpoint."""

    def settings(self, recipe: Recipe, ignored: list[str]) -> dict[str, Any]:
        """Returns ``quantization_config``; ``ignored`` modules stay plain."""

    def tensors(self, rounded: Rounded, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns a layer's tensors by what follows its name and a dot; ``dtype`` is that of the plain weight."""


def format_of(recipe: Recipe) -> Format:
    """Returns the module of a checked recipe's format."""
    found: Format = import_module(f"{__name__}.{recipe.format.replace('-', '_')}")  # type: ignore[assignment]
    return found
