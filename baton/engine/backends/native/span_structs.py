"""The structs of the native step's ops for latents, routing, recurrent states and further norms. Torch-free.

Knows nothing of programs. They mirror the headers that span_ops.h includes, and states.h, field by field.
"""

from __future__ import annotations

import ctypes

from baton.kernels.abi.native import I32, I64, F, P

# span_ops.h: SpanOpKind
NORM_ROWS, LATENT, ROUTE, COMBINE, GATED_HEADS, GATE, GATED_DELTA, STATE_SPACE = range(160, 168)
LAYER_NORM, CENTER, SCALE_ROWS, ACTIVATE, HALVE_HEADS, TEMPER_QUERIES, ROTATE_HEADS = range(168, 175)
ROUTE_TWO, DIVIDE, CONVOLVE, SELECTIVE_SCAN = range(175, 179)
LAYER_INPUTS, GATE_INPUTS, SPARSEN, MATCH_SIZE, SUM_ROWS = range(179, 184)
PREDICT_STREAMS, CORRECT_STREAMS, ADD_TO_EACH, ROTATE_QUERIES = range(184, 188)
MOST_STREAMS = 16  # predict_streams/streams.h
# activate/cpu.cpp: Activation
ACTIVATIONS = {"gelu_new": 0, "gelu_pytorch_tanh": 0, "relu": 1, "relu2": 2, "silu": 3}


class StatesStruct(ctypes.Structure):
    """Mirrors SequenceStates of abi/states.h."""

    _fields_ = [("at", P), ("bytes", I64), ("to", P)]


class ChannelPlaces(ctypes.Structure):
    """Mirrors ChannelPlaces of abi/states.h."""

    _fields_ = [("counts", I64 * 2), ("shifts", I64 * 3)]


class LatentStruct(ctypes.Structure):
    """Mirrors LatentAttention of latent_attention/latent.h."""

    _fields_ = [
        ("norm", P),
        ("expand", P),
        ("place", I64),
        *(
            (name, I32)
            for name in ("expand_dtype", "kv_type", "heads", "plain", "rotary", "value", "rank", "paired")
        ),
        ("eps", F),
        ("scale", F),
    ]


class LatentRows(ctypes.Structure):
    """Mirrors LatentRows of latent_attention/latent.h."""

    _fields_ = [("q", P), ("latent", P), ("q_stride", I64), ("latent_stride", I64), ("out", P), ("out_stride", I64)]


class RouteStruct(ctypes.Structure):
    """Mirrors Route of route/route.h."""

    _fields_ = [
        ("bias", P),
        *((name, I32) for name in ("experts", "chosen", "groups", "kept", "best", "sigmoid", "renormalise")),
        ("scale", F),
    ]


class GatedDeltaStruct(ctypes.Structure):
    """Mirrors GatedDelta of gated_delta/gated_delta.h."""

    _fields_ = [
        *((name, P) for name in ("states", "taps", "fade", "dt_bias", "norm")),
        *((name, I64) for name in ("past", "state")),
        *((name, I32) for name in ("tap_count", "key_heads", "value_heads", "key_dim", "value_dim", "grouped")),
        ("eps", F),
        ("out_stride", I64),
        ("places", ChannelPlaces),
    ]


class StateSpaceStruct(ctypes.Structure):
    """Mirrors StateSpace of state_space/state_space.h."""

    _fields_ = [
        *((name, P) for name in ("states", "taps", "bias", "fade", "skip", "dt_bias", "norm")),
        *((name, I64) for name in ("past", "state")),
        *((name, I32) for name in ("tap_count", "heads", "head_dim", "groups", "size")),
        ("eps", F),
        ("out_stride", I64),
        ("places", ChannelPlaces),
    ]


class TemperingStruct(ctypes.Structure):
    """Mirrors Tempering of halve_heads/halve_heads.h."""

    _fields_ = [("scale", F), ("floor", F), ("shift", I64)]


class ConvolutionStruct(ctypes.Structure):
    """Mirrors ShortConvolution of selective_scan/selective_scan.h."""

    _fields_ = [
        *((name, P) for name in ("states", "taps", "bias")),
        *((name, I64) for name in ("past", "tap_count", "channels")),
    ]


class SelectiveScanStruct(ctypes.Structure):
    """Mirrors SelectiveScan of selective_scan/selective_scan.h."""

    _fields_ = [
        *((name, P) for name in ("states", "fade", "skip")),
        *((name, I64) for name in ("state", "channels", "size")),
    ]


class ScanRows(ctypes.Structure):
    """Mirrors ScanRows of selective_scan/selective_scan.h."""

    _fields_ = [
        *((name, P) for name in ("x", "dt", "b", "c", "gate")),
        *((name, I64) for name in ("x_stride", "gate_stride", "out_stride")),
        ("out", P),
    ]


class RegistersStruct(ctypes.Structure):
    """Mirrors Registers of step/span_ops.h."""

    _fields_ = [("numbers", P), ("count", I64)]


class ScanOpStruct(ctypes.Structure):
    """Mirrors ScanOp of step/span_ops.h."""

    _fields_ = [
        ("scan", SelectiveScanStruct),
        *((name, I32) for name in ("dt", "b", "c", "gated")),
        *((name, I64) for name in ("x_first", "gate_first")),
    ]


class LayerInputsStruct(ctypes.Structure):
    """Mirrors LayerInputs of layer_inputs/layer_inputs.h."""

    _fields_ = [
        *((name, P) for name in ("table", "norm")),
        *((name, I64) for name in ("table_rows", "layers", "width")),
        ("dtype", I32),
        *((name, F) for name in ("eps", "scale")),
    ]


class StreamMixStruct(ctypes.Structure):
    """Mirrors StreamMix of predict_streams/streams.h."""

    _fields_ = [
        *((name, P) for name in ("norm", "router", "mix", "gain")),
        *((name, I64) for name in ("count", "width")),
        ("eps", F),
    ]
