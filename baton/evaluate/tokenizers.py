"""Reads a model's tokenizer, with errors that name the file. Torch-free. Knows nothing of models."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from baton.cluster.served_model import TOKENIZER, require_tokenizer
from baton.protos.errors import CheckpointError


def tokenizer_of(directory: Path) -> Tokenizer:
    """Returns the tokenizer of a model's directory. Raises CheckpointError naming the file."""
    path = require_tokenizer(directory) / TOKENIZER
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"{path} can't be read as a tokenizer: {error}", "model") from error
