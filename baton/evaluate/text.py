"""Texts for evaluation: documents cut into windows of tokens, with their sizes in bytes. Torch-free.

Knows nothing of models. Documents are separated by form feeds. Every token but a window's first is predicted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from baton.protos.errors import ConfigError

WINDOW = 1024  # tokens of a window at most


class Document(NamedTuple):
    """A text as windows of token ids, and its size in bytes."""

    windows: tuple[tuple[int, ...], ...]
    bytes: int

    @property
    def opening(self) -> tuple[int, ...]:
        """Returns the first window of the document."""
        return self.windows[0]


def read_documents(path: Path, most: int | None = None) -> list[str]:
    """Returns at most ``most`` documents from the start of a file. Raises ConfigError naming the file."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read as UTF-8 text: {error}", "text") from error
    found = [part.strip("\n") for part in text.split("\f") if part.strip()][:most]
    if not found:
        raise ConfigError(f"{path} holds no text", "text")
    return found


def cut(texts: list[str], encode: Callable[[str], list[int]], window: int = WINDOW) -> list[Document]:
    """Returns each text as windows of at most ``window`` tokens; texts of fewer than two tokens are left out."""
    cuts = [(tuple(_windows(encode(text), window)), len(text.encode())) for text in texts]
    return [Document(windows, size) for windows, size in cuts if windows]


def _windows(ids: list[int], window: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(ids) - 1, window - 1):
        yield tuple(ids[start : start + window])
