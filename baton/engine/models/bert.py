"""Describes BERT (https://arxiv.org/abs/1810.04805): embeddings such as BGE's and E5's, MiniLM's cross-encoders.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.program.config import ModelConfig
from baton.engine.program.encoder import Encoder, EncoderNames, ScoreHead, scores
from baton.engine.program.program import Program

NAMES = EncoderNames(
    words="embeddings.word_embeddings",
    places="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embed_norm="embeddings.LayerNorm",
    layer="encoder.layer",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    o="attention.output.dense",
    o_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    down_norm="output.LayerNorm",
)
HEAD = ScoreHead("pooler.dense", "classifier")


def program(config: ModelConfig) -> Program:
    """Returns the program of a BERT encoder, with the head of a cross-encoder if the checkpoint has one. Raises
    CheckpointError.
    """
    return encoder(config, first=0, head=HEAD).program(config)


def encoder(config: ModelConfig, first: int, head: ScoreHead) -> Encoder:
    """Returns the encoder that BERT and RoBERTa share; ``first`` is the row of the first token in the position
    table, ``head`` is used if the checkpoint has one. Raises CheckpointError.
    """
    config.must_be("position_embedding_type", "absolute")
    config.must_be("is_decoder", False)
    return Encoder(
        names=NAMES,
        vocab=config.size("vocab_size"),
        hidden=config.size("hidden_size"),
        inner=config.size("intermediate_size"),
        heads=config.size("num_attention_heads"),
        places=config.size("max_position_embeddings", 512) - first,
        windows=(0,) * config.size("num_hidden_layers"),
        eps=config.number("layer_norm_eps", 1e-12),
        activation=str(config.fields.get("hidden_act", "gelu")),
        first=first,
        types=config.size("type_vocab_size", 2),
        head=head if scores(config) else None,
    )
