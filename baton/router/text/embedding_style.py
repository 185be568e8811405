"""Describes how a model makes one vector of a text, by its sentence-transformers files: pooling, and named prompts.

Knows nothing of requests or workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from baton.protos.errors import CheckpointError, InvalidRequest

POOLING, PROMPTS = "1_Pooling/config.json", "config_sentence_transformers.json"
T = TypeVar("T")
MODULES, PLAIN = "modules.json", ("Transformer", "Pooling", "Normalize")
MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "cls"}


class EmbeddingStyle(msgspec.Struct, frozen=True):
    """Holds a model's pooling and its named prompts, texts that are put before an input.

    ``unknown`` names a pooling that isn't supported, else "". ``default_prompt`` is the name of the prompt for
    inputs that name none, "" for no prompt. ``skips_prompt``: the model pools over the input without the prompt,
    which isn't supported.
    """

    pooling: str = "mean"
    unknown: str = ""
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    skips_prompt: bool = False

    def pools(self, asked: str | None) -> str:
        """Returns the pooling of a request that asks for ``asked``, None for the model's own.

        Raises InvalidRequest if the model's own isn't supported.
        """
        if asked is None and self.unknown:
            text = f"this model pools by {self.unknown}, which isn't computed here: give pooling mean or last"
            raise InvalidRequest(text, "pooling")
        return asked or self.pooling

    def prompt(self, name: str | None) -> str:
        """Returns the text of prompt ``name``, None for the default prompt; "" for none.

        Raises InvalidRequest for an unknown name, or if the model pools without its prompts.
        """
        name = self.default_prompt if name is None else name
        if name and name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise InvalidRequest(f"prompt_name is {name!r}; this model's prompts: {known}", "prompt_name")
        found = self.prompts.get(name, "")
        if found and self.skips_prompt:
            text = "this model pools without its prompts, which isn't computed here: name an empty prompt"
            raise InvalidRequest(text, "prompt_name")
        return found


class _Module(msgspec.Struct):
    type: str


class _Prompts(msgspec.Struct):
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None


def embedding_style(directory: Path | None) -> EmbeddingStyle:
    """Returns the style that ``directory``'s sentence-transformers files describe; mean pooling without prompts if
    there are none.

    Raises CheckpointError for a malformed file.
    """
    modes = _read(directory, POOLING, dict[str, object]) or {}
    asked = [name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True]
    asked += [f"a module of kind {kind}" for kind in _kinds(directory) if kind not in PLAIN]
    said = _read(directory, PROMPTS, _Prompts) or _Prompts()
    known = [MODES[name] for name in asked if name in MODES]
    unknown = ", ".join(asked) if asked and (len(asked) > 1 or not known) else ""
    pooling = "mean" if unknown or not known else known[0]
    skips = modes.get("include_prompt") is False and pooling == "mean"
    return EmbeddingStyle(pooling, unknown, said.prompts or {}, said.default_prompt_name or "", skips)


def _kinds(directory: Path | None) -> list[str]:
    """Returns what a sentence-transformers model is made of: the last words of its modules' types."""
    return [each.type.rpartition(".")[2] for each in _read(directory, MODULES, list[_Module]) or ()]


def _read(directory: Path | None, name: str, kind: type[T]) -> T | None:
    path = None if directory is None else directory / name
    if path is None or not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}", name) from error
