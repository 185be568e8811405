"""Describes ModernBERT (https://arxiv.org/abs/2412.13663): rope, norms before attention and MLPs, windows in two of
three layers.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.gemma3_text import ropes_of
from baton.engine.program.config import ModelConfig
from baton.engine.program.encoder import Encoder, EncoderNames, ScoreHead, scores
from baton.engine.program.program import Program

NAMES = EncoderNames(
    words="embeddings.tok_embeddings",
    places="",
    types="",
    embed_norm="embeddings.norm",
    layer="layers",
    qkv=("attn.Wqkv",),
    o="attn.Wo",
    o_norm="attn_norm",
    up="mlp.Wi",
    down="mlp.Wo",
    down_norm="mlp_norm",
    final_norm="final_norm",
)
# Defaults of transformers' config class, because config.json may omit these fields; lengths in tokens.
GLOBAL_THETA, LOCAL_THETA = 160000.0, 10000.0
LOCAL, FULL_EVERY = 128, 3


def program(config: ModelConfig) -> Program:
    """Returns the program of a ModernBERT encoder, with the head of a cross-encoder if the checkpoint has one.
    Raises CheckpointError.
    """
    for name in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
        config.must_be(name, False)
    every = config.size("global_attn_every_n_layers", FULL_EVERY)
    kinds = config.fields.get("layer_types") or [
        "sliding_attention" if layer % every else "full_attention"
        for layer in range(config.size("num_hidden_layers"))
    ]
    local = config.size("local_attention", LOCAL) // 2
    head = ScoreHead(
        "head.dense", "classifier", str(config.fields.get("classifier_activation", "gelu")), "head.norm",
        mean=config.fields.get("classifier_pooling", "cls") == "mean", bias=False,
    )  # fmt: skip
    return Encoder(
        names=NAMES,
        vocab=config.size("vocab_size", 50368),
        hidden=config.size("hidden_size", 768),
        inner=config.size("intermediate_size", 1152),
        heads=config.size("num_attention_heads", 12),
        places=config.size("max_position_embeddings", 8192),
        windows=tuple(local if kind == "sliding_attention" else 0 for kind in kinds),
        eps=config.number("norm_eps", 1e-5),
        activation=str(config.fields.get("hidden_activation", "gelu")),
        after=False,
        bias=False,
        norm_bias=False,
        gated=True,
        ropes=ropes_of(
            config, config.number("global_rope_theta", GLOBAL_THETA), config.number("local_rope_theta", LOCAL_THETA)
        ),
        head=head if scores(config) else None,
    ).program(config)
