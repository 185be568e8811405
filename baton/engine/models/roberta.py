"""Describes RoBERTa (https://arxiv.org/abs/1907.11692): BERT whose positions begin after the padding token's.

Knows nothing of weights' values.
"""

from __future__ import annotations

from baton.engine.models.bert import encoder
from baton.engine.program.config import ModelConfig
from baton.engine.program.encoder import ScoreHead
from baton.engine.program.program import Program

HEAD = ScoreHead("classifier.dense", "classifier.out_proj")


def program(config: ModelConfig) -> Program:
    """Returns the program of a RoBERTa encoder, with the head of a cross-encoder if the checkpoint has one. Raises
    CheckpointError.
    """
    return encoder(config, first=config.count("pad_token_id", 1) + 1, head=HEAD).program(config)
