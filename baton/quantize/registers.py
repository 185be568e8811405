"""Says which registers and weights each op of a decoder's layer reads, and which registers it writes.

Knows nothing of what ops compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from baton.engine.program.ops import (
    Activate,
    Add,
    AddToEach,
    Center,
    Combine,
    Convolve,
    CorrectStreams,
    Divide,
    Gate,
    GatedDelta,
    GatedHeads,
    GateInputs,
    GeGlu,
    HalveHeads,
    LatentAttention,
    LayerInputs,
    LayerNorm,
    Linear,
    MatchSize,
    Moe,
    NormPart,
    Op,
    PagedAttention,
    PredictStreams,
    RmsNorm,
    RopeAppend,
    RotateHeads,
    RotateQueries,
    Route,
    RouteTwo,
    ScaleRows,
    SelectiveScan,
    Sparsen,
    StateSpace,
    SumRows,
    SwiGlu,
    TemperQueries,
)
from baton.protos.errors import ConfigError

# Fields that name the registers which an op reads, and those which it writes.
_ROWS = ("x",), ("out",)
_NORM = ("x", "delta"), ("x", "out")
_ROUTE = ("logits",), ("out", "factor")
FIELDS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys((Activate, Center, Convolve, HalveHeads, Linear, TemperQueries, RotateHeads), _ROWS),
    **dict.fromkeys((LayerInputs, Sparsen, RotateQueries), _ROWS),
    **dict.fromkeys((RmsNorm, LayerNorm), _NORM),
    **dict.fromkeys((Route, RouteTwo), _ROUTE),
    **dict.fromkeys((SwiGlu, GeGlu), (("gate_up",), ("out",))),
    Add: (("x", "delta"), ("x",)),
    NormPart: (("x",), ("x",)),
    RopeAppend: (("qkv",), ("out",)),
    PagedAttention: (("q",), ("out",)),
    LatentAttention: (("q", "latent"), ("out",)),
    GatedHeads: (("x",), ("out", "gate")),
    Gate: (("x", "gate"), ("out",)),
    Moe: (("x", "logits"), ("out",)),
    Combine: (("mixed", "factor", "shared", "gate"), ("out",)),
    ScaleRows: (("x", "factor"), ("out",)),
    GatedDelta: (("mixed", "gates"), ("out",)),
    StateSpace: (("mixed",), ("out",)),
    Divide: (("x",), ("outs",)),
    SelectiveScan: (("x", "dt", "b", "c", "gated"), ("out",)),
    GateInputs: (("x", "inputs"), ("out",)),
    MatchSize: (("x", "streams"), ("out",)),
    SumRows: (("xs",), ("out",)),
    PredictStreams: (("x", "streams"), ("x", "streams")),
    CorrectStreams: (("x", "streams", "y"), ("x", "streams", "out")),
    AddToEach: (("streams", "delta"), ("streams",)),
}


def reads(op: Op) -> set[str]:
    """Returns the registers that an op of a layer reads. Raises ConfigError for an unsupported op."""
    return _named(op, 0)


def writes(op: Op) -> set[str]:
    """Returns the registers that an op of a layer writes. Raises ConfigError for an unsupported op."""
    return _named(op, 1)


def live(ops: Iterable[Op], after: Iterable[str]) -> set[str]:
    """Returns the registers that ``ops`` read before writing them, and those of ``after`` that ``ops`` don't
    write.
    """
    found = set(after)
    for op in reversed(list(ops)):
        found = (found - writes(op)) | reads(op)
    return found


def weights_of(ops: Iterable[Op]) -> set[str]:
    """Returns the names of the weights of a layer's ``ops``; they contain a dot, which no register does."""
    return {name for op in ops for name in _strings(op) if "." in name}


def _strings(of: msgspec.Struct) -> Iterator[str]:
    for field in of.__struct_fields__:
        value = getattr(of, field)
        if isinstance(value, str):
            yield value
        elif isinstance(value, msgspec.Struct):
            yield from _strings(value)


def _named(op: Op, side: int) -> set[str]:
    if type(op) not in FIELDS:
        text = f"{type(op).__name__}: baton quantize takes decoders, and this op is none of theirs"
        raise ConfigError(f"{text}; serve the model with --quantization int8 or int4 instead", "model")
    found: set[str] = set()
    for field in FIELDS[type(op)][side]:
        value = getattr(op, field)
        found |= set(value) if isinstance(value, tuple) else {value} - {None}
    return found
