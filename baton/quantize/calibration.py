"""Calibration texts for quantization: a file's documents, or text drawn from the model, as samples of one length.

Knows nothing of rounding. A ``.jsonl`` file has ``{"text": …}`` or ``{"messages": [{"content": …}]}`` on each line;
any other file is UTF-8 text with form feeds between documents. Errors name the line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from baton.engine.config import EngineConfig
from baton.evaluate.local import BATCH, LocalSubject
from baton.evaluate.tokenizers import tokenizer_of
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS

SELF = "self"  # the model writes its own text
FEW = 16  # samples below which a method is told to be poorly informed


class ChatTurn(msgspec.Struct):
    """One turn of a conversation."""

    content: str


class Line(msgspec.Struct):
    """One line of a ``.jsonl`` file, with either field."""

    text: str = ""
    messages: tuple[ChatTurn, ...] = ()


def read_samples(directory: Path, source: str, samples: int, tokens: int) -> list[list[int]]:
    """Returns at most ``samples`` lists of ``tokens`` token ids, spread evenly over the text ``source``, a path or
    SELF.

    ``directory`` is the model's. Raises ConfigError for unreadable or too short texts and for a ``tokens`` that
    isn't a multiple of a block.
    """
    if tokens % BLOCK_TOKENS or tokens < BLOCK_TOKENS:
        raise ConfigError(f"--tokens {tokens}: use a multiple of {BLOCK_TOKENS}", "tokens")
    if source == SELF:
        return own_text(directory, samples, tokens)
    tokenizer = tokenizer_of(directory)
    ids = [i for text in documents(Path(source)) for i in tokenizer.encode(text, add_special_tokens=True).ids]
    found = [ids[at : at + tokens] for at in range(0, len(ids) - tokens + 1, tokens)]
    if not found:
        text = f"{source} has {len(ids)} tokens, one sample is {tokens}: give more text or a smaller --tokens"
        raise ConfigError(text, "calibration")
    return _spread(found, samples)


def documents(path: Path) -> Iterable[str]:
    """Returns a file's documents. Raises ConfigError naming the line that can't be read."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"--calibration {path}: {error.strerror}", "calibration") from error
    if path.suffix == ".jsonl":
        return [_record(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    text = "\n".join(_decoded(path, number, line) for number, line in enumerate(lines, 1))
    return [part.strip("\n") for part in text.split("\f") if part.strip()]


def own_text(directory: Path, samples: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Returns ``samples`` texts of ``tokens`` ids that the model draws at temperature 1 without a prompt.

    The method is that of https://arxiv.org/abs/2305.17888.
    """
    local = LocalSubject(EngineConfig(str(directory)))
    start = local.encode("") or list(local.runner.spec.eos_token_ids[:1]) or [0]
    found: list[list[int]] = []
    for at in range(0, samples, BATCH):
        prompts = [start] * min(BATCH, samples - at)
        drawn = local.sampled(prompts, tokens - len(start), 1.0, seed + at)
        found += [[*start, *ids] for ids in drawn]
    return found


def _spread(found: list[list[int]], samples: int) -> list[list[int]]:
    """Returns at most ``samples`` items of ``found``, evenly spaced."""
    step = max(1, len(found) // samples)
    return found[::step][:samples]


def _record(path: Path, number: int, line: bytes) -> str:
    try:
        found = msgspec.json.decode(line, type=Line)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}, line {number}: {error}", "calibration") from error
    text = found.text or "\n".join(message.content for message in found.messages)
    if not text.strip():
        raise ConfigError(f'{path}, line {number}: has neither "text" nor "messages" with content', "calibration")
    return text


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}, line {number}: isn't UTF-8 ({error.reason})", "calibration") from error
