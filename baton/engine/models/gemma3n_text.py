"""Describes Gemma 3n's text models (https://ai.google.dev/gemma/docs/gemma-3n): several residual streams, inputs of
each layer's own, and last layers that read the K and V of earlier ones.

Knows nothing of weights' values.
"""

from __future__ import annotations

from statistics import NormalDist

from msgspec.structs import replace

from baton.engine.models.gemma3_text import two_ropes
from baton.engine.program.config import ModelConfig
from baton.engine.program.decoder import GELU_TANH, Decoder, Norms
from baton.engine.program.program import Program
from baton.engine.program.shared_kv import owners
from baton.engine.program.variants.streams import StreamDecoder

# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
MAX_POSITION = 32768
WINDOW, FULL_EVERY = 512, 5
HEAD_DIM, KV_HEADS, INNER = 256, 2, 16384
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
FINAL_SOFTCAP = 30.0
SHARED, STREAMS, NARROW = 15, 4, 64
OWN_VOCAB, OWN_INPUTS = 262144, 256
SPARSE_LAYERS, SPARSITY = 10, 0.95
MOST_STREAMS = 16  # that the native step has room for


def program(config: ModelConfig) -> Program:
    """Returns the program of a Gemma 3n text model. Raises CheckpointError."""
    config.must_be("altup_active_idx", 0)
    layers = config.size("num_hidden_layers")
    inners = _widths(config, layers)
    windows = config.alternating_windows(config.size("sliding_window", WINDOW), FULL_EVERY)
    plain = replace(_decoder(config, inners[0]), windows=windows)
    decoder = StreamDecoder.of(
        plain,
        inners=inners,
        deviations=_deviations(config, layers),
        kv_of=_owners(config, windows),
        streams=_streams(config),
        narrow=config.size("laurel_rank", NARROW),
        own_inputs=config.size("hidden_size_per_layer_input", OWN_INPUTS),
        own_vocab=config.size("vocab_size_per_layer_input", OWN_VOCAB),
        gain=config.flag("altup_correct_scale", True),
    )
    return two_ropes(config, decoder, (GLOBAL_THETA, LOCAL_THETA), MAX_POSITION)


def _decoder(config: ModelConfig, inner: int) -> Decoder:
    fields = config.fields | {"intermediate_size": inner}
    bias = config.flag("attention_bias", False)
    plain = Decoder.read(
        ModelConfig(config.path, fields, config.eos_token_ids),
        HEAD_DIM,
        KV_HEADS,
        True,
        ("hidden_activation", GELU_TANH),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
    return replace(
        plain,
        norms=Norms.AROUND,
        embed_scale=plain.hidden**0.5,
        query_scalar=1.0,
        final_softcap=config.cap("final_logit_softcapping", FINAL_SOFTCAP),
    )


def _widths(config: ModelConfig, layers: int) -> tuple[int, ...]:
    """Returns each layer's MLP width, of which config.json gives one, or one for each layer."""
    found = config.fields.get("intermediate_size")
    if not isinstance(found, list):
        return (config.size("intermediate_size", INNER),) * layers
    if len(found) != layers or not all(isinstance(each, int) and each > 0 for each in found):
        raise config.error("intermediate_size", f"must be a whole number above 0, or {layers} of them")
    return tuple(found)


def _deviations(config: ModelConfig, layers: int) -> tuple[float | None, ...]:
    """Returns how many standard deviations above their mean each layer's gates begin to count, so that the given
    shares of normal numbers lie below; None for all gates. 0 is half of them.
    """
    sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
    found = config.fields.get("activation_sparsity_pattern")
    shares = [SPARSITY] * sparse + [0.0] * (layers - sparse) if found is None else found
    if not isinstance(shares, list) or len(shares) != layers or not all(_is_share(each) for each in shares):
        text = f"must be {layers} numbers, one for each layer, from 0 to below 1"
        raise config.error("activation_sparsity_pattern", text)
    return tuple(NormalDist().inv_cdf(each) if each else None for each in shares)


def _is_share(found: object) -> bool:
    return isinstance(found, int | float) and 0 <= found < 1


def _owners(config: ModelConfig, windows: tuple[int, ...]) -> tuple[int, ...]:
    shared = config.count("num_kv_shared_layers", SHARED)
    found = owners(windows, shared)
    if found is None:
        text = f"is {shared} of {len(windows)} layers, and no layer before them has K and V for some of these"
        raise config.error("num_kv_shared_layers", f"{text}; it must leave one of each of layer_types")
    return found


def _streams(config: ModelConfig) -> int:
    found = config.size("altup_num_inputs", STREAMS)
    if not 2 <= found <= MOST_STREAMS:
        raise config.error("altup_num_inputs", f"is {found}; 2 to {MOST_STREAMS} are known")
    return found
