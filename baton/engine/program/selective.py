"""Describes layers of the first Mamba, as Jamba has them: a convolution, projections of its output, a scan.

Knows nothing of tensors or of files' formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import dense
from baton.engine.program.ops import Convolve, Divide, Linear, Op, RmsNorm, SelectiveScan
from baton.engine.program.program import Weight
from baton.protos.nouns import StatePlane

PARTS = ("dt", "b", "c")  # what a layer projects its convolved rows to


class SelectiveLayers(msgspec.Struct, frozen=True):
    """Describes layers of ``inner`` channels, each with a state of ``size`` numbers; steps are projected from
    ``rank`` numbers.
    """

    inner: int
    size: int
    rank: int
    kernel: int  # tokens that the convolution spans
    eps: float  # of the norms of steps, B and C
    conv_bias: bool
    bias: bool  # the projections in and out have biases
    at: str = "mamba"  # the checkpoint's name of the module in a layer

    @classmethod
    def read(cls, config: ModelConfig, hidden: int, eps: float) -> SelectiveLayers:
        """Reads the sizes from ``config``; ``hidden`` is the model's width. Raises CheckpointError."""
        inner, kernel = config.size("mamba_expand", 2) * hidden, config.size("mamba_d_conv", 4)
        if kernel < 2:
            raise config.error("mamba_d_conv", f"is {kernel}; it must be 2 or more")
        rank = config.fields.get("mamba_dt_rank", "auto")
        rank = math.ceil(hidden / 16) if rank == "auto" else config.size("mamba_dt_rank")
        biases = config.flag("mamba_conv_bias", True), config.flag("mamba_proj_bias", False)
        return cls(inner, config.size("mamba_d_state", 16), rank, kernel, eps, *biases)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Returns the widths of a row's step, B and C."""
        return self.rank, self.size, self.size

    def ops(self, layer: int, place: int) -> tuple[Op, ...]:
        """Returns the ops of ``layer``, the ``place``-th of its kind."""
        into, out = (f"{layer}.{part}_bias" if self.bias else None for part in ("in", "out"))
        conv_bias = f"{layer}.conv_bias" if self.conv_bias else None
        raw = tuple(f"{part}_raw" for part in PARTS)
        norms = (RmsNorm(f"{part}_raw", None, f"{layer}.{part}_norm", self.eps, f"{part}_in") for part in PARTS)
        scanned = "fed", "steps", "b_in", "c_in", "gated_in", place, f"{layer}.a_log", f"{layer}.skip"
        return (
            Linear("h", f"{layer}.in", into, "gated_in"),
            Convolve("gated_in", place, f"{layer}.conv", conv_bias, self.inner, "fed"),
            Linear("fed", f"{layer}.x", None, "selected"),
            Divide("selected", self.widths, raw),
            *norms,
            Linear("dt_in", f"{layer}.dt", f"{layer}.dt_bias", "steps"),
            SelectiveScan(*scanned, self.size, "read"),
            Linear("read", f"{layer}.out", out, "o"),
        )

    def weights(self, layer: int, hidden: int) -> Iterator[Weight]:
        """Yields the weights of ``layer`` of a model of width ``hidden``."""
        at, inner = f"model.layers.{layer}.{self.at}", self.inner
        yield from dense(layer, "in", at, ("in_proj",), (2 * inner,), hidden, self.bias)
        yield from dense(layer, "out", at, ("out_proj",), (hidden,), inner, self.bias)
        yield from dense(layer, "x", at, ("x_proj",), (sum(self.widths),), inner, False)
        yield from dense(layer, "dt", at, ("dt_proj",), (inner,), self.rank, True)
        yield Weight(f"{layer}.conv", (f"{at}.conv1d.weight",), ((inner, 1, self.kernel),))
        if self.conv_bias:
            yield Weight(f"{layer}.conv_bias", (f"{at}.conv1d.bias",), ((inner,),))
        yield Weight(f"{layer}.a_log", (f"{at}.A_log",), ((inner, self.size),))
        yield Weight(f"{layer}.skip", (f"{at}.D",), ((inner,),))
        for part, width in zip(PARTS, self.widths, strict=True):
            yield Weight(f"{layer}.{part}_norm", (f"{at}.{part}_layernorm.weight",), ((width,),))

    def planes(self, layers: int) -> tuple[StatePlane, ...]:
        """Returns the arrays of state for ``layers`` layers: the convolution's last inputs, and the scan's
        states.
        """
        return (
            StatePlane("conv", layers, (self.inner, self.kernel - 1)),
            StatePlane("ssm", layers, (self.inner, self.size)),
        )
