"""Reads a checkpoint's config.json (and generation_config.json), with errors that name file and field.

Knows nothing of tensors or architectures' defaults. It reads both spellings: transformers 5 (``rope_parameters``,
``dtype``) and older ones (``rope_scaling``, ``rope_theta``, ``torch_dtype``).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.engine.program.program import Rope
from baton.protos.errors import CheckpointError
from baton.protos.json import Json

DEFAULT_ROPE_THETA = 10000.0  # Hugging Face's default base of the rotary frequencies

SHARED = ("tie_word_embeddings",)  # fields that a file of several parts may state for all of them


class ModelConfig:
    """Holds the fields of one config.json. A field that is missing or null takes the architecture's default;
    without one, CheckpointError names it.
    """

    def __init__(self, path: Path, fields: Json, eos_token_ids: tuple[int, ...]) -> None:
        self.path = path
        self.fields = fields
        self.eos_token_ids = eos_token_ids

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """Reads config.json of ``directory``, and the end tokens from generation_config.json if that has them; a
        model of several parts may state them in ``text_config``.

        Raises CheckpointError if a file is missing or can't be read.
        """
        path = directory / "config.json"
        fields = _read_json(path)
        generation = directory / "generation_config.json"
        text = fields.get("text_config")
        stated = [
            _read_json(generation) if generation.exists() else {},
            fields,
            text if isinstance(text, dict) else {},
        ]
        ends = [found["eos_token_id"] for found in stated if found.get("eos_token_id") is not None]
        return cls(path, fields, _ids(path, ends[0] if ends else None))

    @property
    def model_type(self) -> str:
        """Returns the architecture's name. Raises CheckpointError if it is missing."""
        found = self.fields.get("model_type")
        if not isinstance(found, str):
            raise self.error("model_type", "is missing; it names the architecture")
        return found

    def size(self, name: str, default: int | None = None) -> int:
        """Returns field ``name``, a whole number above 0, or ``default``. Raises CheckpointError for other
        values.
        """
        found = self._get(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.error(name, f"is {found!r}; it must be a whole number above 0")
        return found

    def count(self, name: str, default: int) -> int:
        """Returns field ``name``, a whole number of 0 or more, or ``default``. Raises CheckpointError for other
        values.
        """
        found = self._get(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise self.error(name, f"is {found!r}; it must be a whole number, 0 or more")
        return found

    def number(self, name: str, default: float) -> float:
        """Returns field ``name`` as a float, or ``default``. Raises CheckpointError unless it is a number."""
        found = self._get(name, default)
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise self.error(name, f"is {found!r}; it must be a number")
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        """Returns field ``name``, true or false, or ``default``. Raises CheckpointError for other values."""
        found = self._get(name, default)
        if not isinstance(found, bool):
            raise self.error(name, f"is {found!r}; it must be true or false")
        return found

    def cap(self, name: str, default: float) -> float:
        """Returns field ``name``, a number above 0; 0 if it is null, ``default`` if it is absent. Raises
        CheckpointError for other values.
        """
        if name in self.fields and self.fields[name] is None:
            return 0.0
        found = self.number(name, default)
        if found < 0 or (name in self.fields and found == 0):
            raise self.error(name, f"is {found:g}; it must be above 0, or null for none")
        return found

    def window(self, default: int | None) -> int:
        """Returns ``sliding_window`` in tokens, 0 for no window (null); ``default`` if the field is absent."""
        found = self.fields.get("sliding_window", default)
        if found is None:
            return 0
        return self.size("sliding_window", default)

    def layer_windows(self, layers: int, window: int) -> tuple[int, ...]:
        """Returns the attention window of each of ``layers`` layers, ``window`` or 0 for full attention.

        They are given by ``layer_types``, or else layers from number ``max_window_layers`` on have the window.
        Raises CheckpointError.
        """
        kinds = self.fields.get("layer_types")
        if kinds is None:
            first = self.fields.get("max_window_layers", 28)
            return tuple(window if layer >= first else 0 for layer in range(layers))
        known = {"full_attention": 0, "sliding_attention": window}
        if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(known):
            raise self.error("layer_types", f"must name {layers} layers, each one of {', '.join(known)}")
        return tuple(known[kind] for kind in kinds)

    def alternating_windows(self, window: int, full_every: int) -> tuple[int, ...]:
        """Returns each layer's attention window by ``layer_types``; if that is absent, every ``full_every``-th
        layer has 0 (full attention).
        """
        layers = self.size("num_hidden_layers")
        if self.fields.get("layer_types") is not None:
            return self.layer_windows(layers, window)
        return tuple(window if (layer + 1) % full_every else 0 for layer in range(layers))

    def must_be(self, name: str, *known: object) -> None:
        """Raises CheckpointError unless field ``name`` is absent, null or one of ``known``."""
        if (found := self.fields.get(name)) is not None and found not in known:
            choices = " or ".join(repr(each) for each in known)
            raise self.error(name, f"is {found!r}; only {choices} is known here")

    def with_default(self, name: str, value: object) -> ModelConfig:
        """Returns a copy of the config with field ``name`` set to ``value`` if it is absent or null."""
        return ModelConfig(self.path, self.fields | {name: self._get(name, value)}, self.eos_token_ids)

    def part(self, name: str, defaults: Json | None = None) -> ModelConfig:
        """Returns the config in field ``name``, an object, completed by ``SHARED`` fields beside it and by
        ``defaults``. Raises CheckpointError if it is no object.
        """
        found = self.fields.get(name)
        if not isinstance(found, dict):
            raise self.error(name, f"is {found!r}; it must be an object")
        shared = {name: self.fields[name] for name in SHARED if self.fields.get(name) is not None}
        return ModelConfig(self.path, (defaults or {}) | shared | found, self.eos_token_ids)

    def rope(self, default_theta: float = DEFAULT_ROPE_THETA) -> Rope:
        """Returns the rotary embedding's parameters, in either spelling; ``default_theta`` is the base if none is
        given.
        """
        new, old = self.fields.get("rope_parameters"), self.fields.get("rope_scaling")
        if new and old and new != old:
            raise self.error("rope_scaling", "says something else than rope_parameters: remove one of them")
        raw = new or old or {}
        if not isinstance(raw, dict):
            raise self.error("rope_parameters", "must be an object")
        return self.rope_of(raw, default_theta)

    def rope_of(self, raw: Json, default_theta: float) -> Rope:
        """Returns the rotary embedding's parameters in ``raw``, an object of config.json such as
        ``rope_parameters``. Raises CheckpointError.
        """
        kind = raw.get("rope_type", raw.get("type", "default"))
        theta = raw.get("rope_theta") or self.number("rope_theta", default_theta) or default_theta
        if not isinstance(theta, int | float):
            raise self.error("rope_theta", f"is {theta!r}; it must be a number")
        skip = {"rope_type", "type", "rope_theta"}
        parameters = {k: float(v) for k, v in raw.items() if k not in skip and isinstance(v, int | float)}
        for name in ("partial_rotary_factor", "original_max_position_embeddings"):
            if isinstance(self.fields.get(name), int | float):
                parameters[name] = float(self.fields[name])
        return Rope(str(kind), float(theta), parameters, (self._factors(raw, "short"), self._factors(raw, "long")))

    def _factors(self, raw: Json, which: str) -> tuple[float, ...]:
        found = raw.get(f"{which}_factor") or []
        if not isinstance(found, list) or not all(isinstance(each, int | float) for each in found):
            raise self.error(f"{which}_factor", "must be a list of numbers")
        return tuple(map(float, found))

    def error(self, name: str, problem: str) -> CheckpointError:
        """Returns an error that names the file and field ``name``, followed by ``problem``."""
        return CheckpointError(f"{self.path}: {name} {problem}", name)

    def _get(self, name: str, default: object) -> object:
        found = self.fields.get(name)
        return default if found is None else found


def _read_json(path: Path) -> Json:
    try:
        return _decoded(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a model's directory needs one", "model") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} can't be read as a JSON object: {error}", "model") from error


def _decoded(content: bytes) -> Json:
    """Returns a JSON object; infinities, which Python writes and JSON lacks, are read as null."""
    try:
        return msgspec.json.decode(content, type=Json)
    except msgspec.DecodeError:
        if b"Infinity" not in content:
            raise
        return msgspec.json.decode(content.replace(b"-Infinity", b"null").replace(b"Infinity", b"null"))


def _ids(path: Path, found: object) -> tuple[int, ...]:
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"{path}: eos_token_id is {found!r}; it must be token ids", "eos_token_id")
    return tuple(ids)
