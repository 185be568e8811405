"""Lists every op that a program is made of; a program's ops are in the order in which they run.

Knows nothing of tensors, of files or of how an op is computed. An op reads and writes registers by name; ``x`` is
the residual stream. An op's weights are names in ``Program.weights``.
"""

from __future__ import annotations

from baton.engine.program.ops.attention import (
    Gate,
    GatedHeads,
    HalveHeads,
    LatentAttention,
    PagedAttention,
    RopeAppend,
    RotateHeads,
    TemperQueries,
)
from baton.engine.program.ops.encoding import Activate, Classify, EmbedText, FullAttention, LayerNorm
from baton.engine.program.ops.experts import Combine, Moe, MoeGate, Route, RouteTwo
from baton.engine.program.ops.ranks import Exchange, Meet, MixExperts, OwnExperts
from baton.engine.program.ops.recurrent import Convolve, Divide, GatedDelta, SelectiveScan, StateSpace
from baton.engine.program.ops.rows import Adapt, Add, Center, GeGlu, Linear, NormPart, RmsNorm, ScaleRows, SwiGlu
from baton.engine.program.ops.streams import (
    AddToEach,
    CorrectStreams,
    GateInputs,
    LayerInputs,
    MatchSize,
    PredictStreams,
    RotateQueries,
    Sparsen,
    SumRows,
)
from baton.engine.program.ops.tokens import Embedding, LmHead

__all__ = [
    "Activate",
    "Adapt",
    "Add",
    "AddToEach",
    "Center",
    "Classify",
    "Combine",
    "Convolve",
    "CorrectStreams",
    "Divide",
    "EmbedText",
    "Embedding",
    "Exchange",
    "FullAttention",
    "Gate",
    "GateInputs",
    "GatedDelta",
    "GatedHeads",
    "GeGlu",
    "HalveHeads",
    "LatentAttention",
    "LayerInputs",
    "LayerNorm",
    "Linear",
    "LmHead",
    "MatchSize",
    "Meet",
    "MixExperts",
    "Moe",
    "MoeGate",
    "NormPart",
    "Op",
    "OwnExperts",
    "PagedAttention",
    "PredictStreams",
    "RmsNorm",
    "RopeAppend",
    "RotateHeads",
    "RotateQueries",
    "Route",
    "RouteTwo",
    "ScaleRows",
    "SelectiveScan",
    "Sparsen",
    "StateSpace",
    "SumRows",
    "SwiGlu",
    "TemperQueries",
]

Op = (
    Embedding
    | RmsNorm
    | Add
    | NormPart
    | Linear
    | Adapt
    | RopeAppend
    | PagedAttention
    | SwiGlu
    | GeGlu
    | Moe
    | Route
    | Combine
    | LatentAttention
    | GatedHeads
    | Gate
    | GatedDelta
    | StateSpace
    | LmHead
    | Meet
    | Exchange
    | OwnExperts
    | MixExperts
    | EmbedText
    | LayerNorm
    | FullAttention
    | Activate
    | Classify
    | HalveHeads
    | TemperQueries
    | Center
    | ScaleRows
    | RotateHeads
    | RouteTwo
    | Convolve
    | Divide
    | SelectiveScan
    | LayerInputs
    | GateInputs
    | Sparsen
    | MatchSize
    | SumRows
    | PredictStreams
    | CorrectStreams
    | AddToEach
    | RotateQueries
)
