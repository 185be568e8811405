"""The quantization methods by name: what each rounds a weight to, whether it scales inputs, and whether it reads
text.

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
from baton.quantize.quantized_weight import QuantizedWeight
from baton.quantize.stats import ActivationStats

# Weights that share a scale: as bitsandbytes has it, and as the OCP MX specification has it.
NF4_BLOCK, MX_BLOCK = 64, 32
FORMATS = {
    "rtn": ("compressed-tensors", "gptq", "awq"),
    "gptq": ("gptq", "compressed-tensors"),
    "awq": ("awq", "gptq", "compressed-tensors"),
    "smoothquant": ("compressed-tensors",),
    "nf4": ("bitsandbytes",),
    "fp8": ("compressed-tensors",),
    "mxfp4": ("compressed-tensors", "mxfp4"),
}
INTEGERS = ("rtn", "gptq", "awq")
BITS, GROUP = 4, 128  # of INTEGERS unless told: as most checkpoints that others publish
# Bits and inputs per scale of the methods that have no choice; 0 for a whole row.
FIXED = {"smoothquant": (8, 0), "nf4": (4, NF4_BLOCK), "fp8": (8, 0), "mxfp4": (4, MX_BLOCK)}
COMPRESSED = "compressed-tensors"


def grid_of(method: str, bits: int | None, group: int | None) -> tuple[int, int]:
    """Returns the bits and the group of a recipe whose user asked for ``bits`` and ``group``, None if for nothing.

    Raises ConfigError if the method rounds to others.
    """
    for flag, asked, fixed in zip(("bits", "group"), (bits, group), FIXED.get(method, (None, None)), strict=True):
        if asked is not None and fixed is not None and asked != fixed:
            text = f"--{flag} {asked}: {method} has {fixed or 'whole rows'}; leave it out"
            raise ConfigError(f"{text}, or use {', '.join(INTEGERS)}", flag)
    return (BITS if bits is None else bits, GROUP if group is None else group)


class Recipe(msgspec.Struct, frozen=True):
    """The settings by which a checkpoint is quantized."""

    method: str  # a key of FORMATS
    bits: int = BITS
    group: int = GROUP  # inputs per scale; 0 for a whole row
    symmetric: bool = True  # whether zero points are the middle of the range
    act_order: bool = True  # whether GPTQ takes inputs by falling second moments
    regroup: bool = False  # whether GPTQ's groups follow that order (desc_act)
    format: str = ""  # "" for the method's first that others load as it is
    kv_cache_dtype: str = ""  # "fp8": the checkpoint has scales for such KV, and asks for it

    @property
    def takes_experts_only(self) -> bool:
        """Returns whether everything but experts stays as it is, as gpt-oss's own format has it."""
        return self.format == "mxfp4"

    @property
    def hides_experts(self) -> bool:
        """Returns whether transformers doesn't load a model's experts in this form."""
        return self.format in ("gptq", "awq", "bitsandbytes") or self.method == "smoothquant" or not self.symmetric

    def checked(self, experts: bool = False) -> Recipe:
        """Returns the recipe with its format filled in; ``experts`` says whether the model has any.

        Raises ConfigError naming the flag that is wrong.
        """
        if self.method not in FORMATS:
            raise ConfigError(f"--method {self.method!r} is unknown; use {', '.join(FORMATS)}", "method")
        choices = FORMATS[self.method]
        if self.format and self.format not in choices:
            text = f"--format {self.format!r}: {self.method} is written as {' or '.join(choices)}"
            raise ConfigError(text, "format")
        found = msgspec.structs.replace(self, format=self.format or self._first_of(choices, experts))
        found._require_possible()
        return found

    def _first_of(self, choices: tuple[str, ...], experts: bool) -> str:
        """Returns the method's first format that transformers loads without being told anything.

        Zero points that compressed-tensors packs need ``dequantize``; experts load as compressed-tensors alone.
        """
        if self.method not in INTEGERS or self.kv_cache_dtype:
            return choices[0]
        if self.symmetric and experts and not self.regroup:
            return COMPRESSED
        fitting = (name for name in choices if self.symmetric or name != COMPRESSED)
        return next(name for name in fitting if name != "awq" or self.bits == 4)

    def _require_possible(self) -> None:
        if self.method in INTEGERS and self.bits not in (4, 8):
            raise ConfigError(f"--bits {self.bits}: use 4 or 8", "bits")
        if self.format == "awq" and self.bits != 4:
            raise ConfigError(f"--bits {self.bits}: the awq format holds 4", "bits")
        if self.method in INTEGERS and (self.group < 0 or self.group % 32):
            raise ConfigError(f"--group {self.group}: use 0 (a whole row) or a multiple of 32", "group")
        if not self.symmetric and self.method not in INTEGERS:
            text = f"--asymmetric: {self.method} has no zero points; leave it out, or use {', '.join(INTEGERS)}"
            raise ConfigError(text, "asymmetric")
        if self.regroup and (self.method != "gptq" or self.format != "gptq" or not self.act_order):
            raise ConfigError("--regroup is for the gptq method and format, with act-order", "regroup")
        if self.kv_cache_dtype not in ("", "fp8"):
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype!r}: scales are written for fp8", "kv_cache_dtype"
            )
        if self.kv_cache_dtype and self.format != "compressed-tensors":
            text = f"--kv-cache-dtype is written as compressed-tensors, not as {self.format}; use that --format"
            raise ConfigError(text, "kv_cache_dtype")


class Scheme(Protocol):
    """Quantizes weights by one method. ``needs_text`` says whether it needs ``stats``, which are None otherwise."""

    needs_text: bool

    @property
    def group(self) -> int:
        """Returns the number of inputs that share a scale; 0 for a whole row."""

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> QuantizedWeight:
        """Returns a weight (n, k) quantized; ``stats`` are those of its inputs over the calibration text."""

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Tie) -> Tensor | None:
        """Returns factors (k,) to divide the inputs by and multiply the weight with; None for none.

        ``tie`` evens out the factors of inputs that must share theirs.
        """


def scheme_of(recipe: Recipe) -> Scheme:
    """Returns the scheme of ``recipe``, which must be checked."""
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


def needs_text(recipe: Recipe) -> bool:
    """Returns whether ``recipe``, which must be checked, reads a text: for its method, or for its KV's scales."""
    return scheme_of(recipe).needs_text or bool(recipe.kv_cache_dtype)


class Nearest:
    """Implements ``Scheme`` by rounding each weight to the nearest number of a grid."""

    needs_text = False

    def __init__(self, grid: Grid) -> None:
        self._grid, self.group = grid, grid.group

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> QuantizedWeight:
        """Returns a weight (n, k) rounded to the nearest numbers; ``stats`` are not used."""
        return to_nearest(weight, self._grid)

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Tie) -> Tensor | None:
        """Returns None, because rounding to nearest doesn't scale inputs."""
        return None


class Gptq:
    """Implements ``Scheme`` by the method of ``methods/gptq.py``."""

    needs_text = True

    def __init__(self, grid: IntGrid, act_order: bool, regroup: bool) -> None:
        self._grid, self.group, self._act_order, self._regroup = grid, grid.group, act_order, regroup

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> QuantizedWeight:
        """Returns a weight (n, k) quantized so that later inputs compensate for the errors of earlier ones."""
        assert stats is not None
        return gptq(weight, stats.hessian, self._grid, self._act_order, self._regroup)

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Tie) -> Tensor | None:
        """Returns None, because GPTQ doesn't scale inputs."""
        return None


class Awq:
    """Implements ``Scheme`` by the method of ``methods/awq.py``."""

    needs_text = True

    def __init__(self, grid: IntGrid) -> None:
        self._grid, self.group = grid, grid.group

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> QuantizedWeight:
        """Returns a weight (n, k) rounded to the nearest numbers within clipped ranges of least output error."""
        assert stats is not None
        return awq.clipped(weight, stats.hessian, self._grid)

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Tie) -> Tensor | None:
        """Returns factors (k,) for the inputs with the least output error."""
        return awq.best_scales(weight, stats, self._grid, tie)


class SmoothQuant:
    """Implements ``Scheme`` by the method of ``methods/smoothquant.py``: int8 weights with a scale per row."""

    needs_text = True
    group = 0

    def __init__(self) -> None:
        self._grid = IntGrid(8, 0, wide=True)

    def rounded(self, weight: Tensor, stats: ActivationStats | None) -> QuantizedWeight:
        """Returns a weight (n, k) rounded to int8 with a float32 scale per row; ``stats`` are not used."""
        return to_nearest(weight, self._grid)

    def scales(self, weight: Tensor, stats: ActivationStats, tie: Tie) -> Tensor | None:
        """Returns factors (k,) for the inputs with the least output error."""
        return smoothquant.best_scales(weight, stats, self._grid, tie)
