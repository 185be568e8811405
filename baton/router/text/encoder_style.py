"""The prompts that an encoder model takes, and the meaning of its scores, by its config.json.

Knows nothing of requests or workers. An encoder reads a text in both directions and generates none.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from baton.protos.errors import CheckpointError
from baton.protos.json import Json
from baton.router.text.model import TextModel
from baton.router.text.reranking import TokenLimits

ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")  # the ``model_type``s of encoders
HEAD = "ForSequenceClassification"  # how the name of an architecture with a head ends
IDENTITY = "Identity"


class EncoderStyle(msgspec.Struct, frozen=True):
    """Describes the prompts that an encoder takes, and its scores."""

    vocab: int  # size of the vocabulary
    types: int = 1  # segments it tells apart; ids in the second are raised by ``vocab``
    scores: bool = False  # a cross-encoder: its head scores a pair
    raw: bool = False  # scores are the head's logits, else their sigmoid

    async def prompt(self, text: TextModel, query: str, document: str, most: TokenLimits) -> list[int]:
        """Returns the prompt's token ids for a pair; ids of the second segment are raised by ``vocab``.

        ``most`` limits the tokens. Raises ContextTooLong and InvalidRequest.
        """
        document = await text.beginning(document, most.prompt if most.document is None else most.document)
        pair = await text.encode_pair(query, document, most.prompt, most.document)
        return [i + self.vocab * min(of, self.types - 1) for i, of in zip(pair.ids, pair.types, strict=True)]

    def score(self, pooled: bytes) -> float:
        """Returns a pair's score, from the float32 logit in ``pooled``: the logit itself if ``raw``, else its
        sigmoid.
        """
        found = float(np.frombuffer(pooled, "<f4")[0])
        return found if self.raw else 1.0 / (1.0 + math.exp(-max(found, -700.0)))


def encoder_style(directory: Path | None) -> EncoderStyle | None:
    """Returns the encoder's style by ``directory``'s config.json; None for a model that generates, or without the
    file.

    Raises CheckpointError.
    """
    path = None if directory is None else directory / "config.json"
    if path is None or not path.is_file():
        return None
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}", "config.json") from error
    if found.model_type not in ENCODERS:
        return None
    scores = any(name.endswith(HEAD) for name in found.architectures or ())
    types = 1 if found.model_type == "modernbert" else found.type_vocab_size
    return EncoderStyle(found.vocab_size, types, scores, _is_raw(found))


class _Config(msgspec.Struct):
    model_type: str = ""
    vocab_size: int = 0
    type_vocab_size: int = 2
    architectures: list[str] | None = None
    sentence_transformers: Json | None = None
    sbert_ce_default_activation_function: str | None = None


def _is_raw(found: _Config) -> bool:
    """Returns whether sentence-transformers leaves scores as they are, by a class's name in either spelling."""
    said = (found.sentence_transformers or {}).get("activation_fn") or found.sbert_ce_default_activation_function
    return str(said or "").endswith(IDENTITY)
