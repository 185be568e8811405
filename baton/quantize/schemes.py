"""The methods by name: what each rounds a weight to, whether it moves scales, and whether it reads text.

Knows nothing of files or of how layers run.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch
from torch import Tensor

from baton.protos.errors import ConfigError
from baton.quantize.grids import NF4, Fp8Grid, Grid, IntGrid, MxGrid, TableGrid, to_nearest
from baton.quantize.methods import awq, smoothquant
from baton.quantize.methods.awq import Tie
from baton.quantize.methods.gptq import gptq
from baton.quantize.rounded import Rounded
from baton.quantize.stats import ActivationStats

NF4_BLOCK, MX_BLOCK = 64, 32
FORMATS = {
    "rtn": ("compressed-tensors", "gptq", "awq"),
    "gptq": ("gptq", "compressed-tensors"),
    "awq": ("awq", "gptq", "compressed-tensors"),
    "smoothquant": ("compressed-tensors",),
    "nf4": ("bitsandbytes",),
    "fp8": ("compressed-tensors",),
    "mxfp4": ("compressed-tensors",),
}
INTEGERS = ("rtn", "gptq", "awq")


class Recipe(msgspec.Struct, frozen=True):
    """Says how a checkpoint is to be quantized.

    ``group`` 0 is a whole row; ``regroup`` has GPTQ's groups follow its order (desc_act).
    """

    method: str
    bits: int = 4
    group: int = 128
    symmetric: bool = True
    act_order: bool = True
    regroup: bool = False
    format: str = ""

    def checked(self) -> Recipe:
        """Returns it with its format. Raises ConfigError naming the flag."""
        if self.method not in FORMATS:
            raise ConfigError(f"--method {self.method!r} is unknown; use {', '.join(FORMATS)}", "method")
        choices = FORMATS[self.method]
        if self.format and self.format not in choices:
            text = f"--format {self.format!r}: {self.method} is written as {' or '.join(choices)}"
            raise ConfigError(text, "format")
        found = msgspec.structs.replace(self, format=self.format or choices[0])
        found._require_possible()
        return found

    def _require_possible(self) -> None:
        if self.method in INTEGERS and self.bits not in (4, 8):
            raise ConfigError(f"--bits {self.bits}: use 4 or 8", "bits")
        if self.format == "awq" and self.bits != 4:
            raise ConfigError(f"--bits {self.bits}: the awq format holds 4", "bits")
        if self.method in INTEGERS and self.group % 32:
            raise ConfigError(f"--group {self.group}: use 0 (a whole row) or a multiple of 32", "group")
        if self.regroup and (self.method != "gptq" or self.format != "gptq" or not self.act_order):
            raise ConfigError("--regroup is for the gptq method and format, with act-order", "regroup")


class Scheme(Protocol):
    """Rounds the weights of one method. ``reads_text``: ``stats`` are given, else they are None."""

    reads_text: bool

    @property
    def group(self) -> int:
        """Returns how many inputs share a scale, 0 for a whole row."""

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> Rounded:
        """Returns a weight (n, k) rounded."""

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Tie) -> Tensor | None:
        """Returns factors (k,) that inputs are divided by and the weight is multiplied with; None for none."""


def scheme_of(recipe: Recipe) -> Scheme:
    """Returns the scheme of a checked recipe."""
    integers = IntGrid(recipe.bits, recipe.group, recipe.symmetric)
    schemes: dict[str, Scheme] = {
        "rtn": Nearest(integers),
        "gptq": Gptq(integers._replace(search=True), recipe.act_order, recipe.regroup),
        "awq": Awq(integers),
        "smoothquant": SmoothQuant(),
        "nf4": Nearest(TableGrid(torch.tensor(NF4), NF4_BLOCK)),
        "fp8": Nearest(Fp8Grid()),
        "mxfp4": Nearest(MxGrid(MX_BLOCK)),
    }
    return schemes[recipe.method]


class Nearest:
    """Implements ``Scheme``: each weight to the nearest number."""

    reads_text = False

    def __init__(self, grid: Grid) -> None:
        self._grid, self.group = grid, grid.group

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> Rounded:
        """Returns the nearest numbers."""
        return to_nearest(weight, self._grid)

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Tie) -> Tensor | None:
        """Returns None, because this method moves nothing."""
        return None


class Gptq:
    """Implements ``Scheme`` by the method of ``methods/gptq.py``."""

    reads_text = True

    def __init__(self, grid: IntGrid, act_order: bool, regroup: bool) -> None:
        self._grid, self.group, self._act_order, self._regroup = grid, grid.group, act_order, regroup

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> Rounded:
        """Returns numbers that make up for one another's errors."""
        assert stats is not None
        return gptq(weight, stats.hessian, self._grid, self._act_order, self._regroup)

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Tie) -> Tensor | None:
        """Returns None, because this method moves nothing."""
        return None


class Awq:
    """Implements ``Scheme`` by the method of ``methods/awq.py``."""

    reads_text = True

    def __init__(self, grid: IntGrid) -> None:
        self._grid, self.group = grid, grid.group

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> Rounded:
        """Returns the nearest numbers within searched ranges."""
        assert stats is not None
        return awq.clipped(weight, stats.hessian, self._grid)

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Tie) -> Tensor | None:
        """Returns the factors of least error."""
        return awq.best_scales(weight, stats, self._grid, tie)


class SmoothQuant:
    """Implements ``Scheme`` by the method of ``methods/smoothquant.py``."""

    reads_text = True
    group = 0

    def __init__(self) -> None:
        self._grid = IntGrid(8, 0, wide=True)

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> Rounded:
        """Returns int8 by row."""
        return to_nearest(weight, self._grid)

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Tie) -> Tensor | None:
        """Returns the factors of least error."""
        return smoothquant.best_scales(weight, stats, self._grid, tie)
