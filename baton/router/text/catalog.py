"""Which models are served and what the surfaces must know of each: limits, text side, default sampling.

Knows nothing of workers: what is served comes from ``models``, where a model's files lie from ``sources``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from baton.protos.errors import CheckpointError, InvalidRequest, ModelNotFound, NoWorker
from baton.router.access.json import Json
from baton.router.request.request import ServedModel
from baton.router.text.model import TextModel, load_text

_DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ModelEntry(msgspec.Struct, frozen=True):
    """Describes one served model. ``defaults`` are the sampling fields of its generation_config.json.

    ``has_text``: its tokens stand for text, so that it can't be served without its tokenizer.
    """

    model_id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()
    source: Path | None = None
    defaults: Json = {}
    created: int = 0
    has_text: bool = False

    def require_adapter(self, adapter_id: str) -> None:
        """Raises ModelNotFound for an adapter that no worker has."""
        if adapter_id and adapter_id not in self.adapters:
            raise ModelNotFound(f"adapter {adapter_id!r} is not served with {self.model_id!r}", "adapter")


class ModelCatalog:
    """Knows the models of ``models()`` by id, each with its files under ``sources[model_id]`` (None or absent: no
    files).

    A model that was seen stays known, so that a request for one whose workers restart meets 503, not 404.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[ServedModel]],
        sources: Mapping[str, Path | None] | None = None,
        wall_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._models = models
        self._sources = dict(sources or {})
        self._wall_clock = wall_clock
        self._entries: dict[str, tuple[ServedModel, ModelEntry]] = {}
        self._texts: dict[str, TextModel] = {}

    def entries(self) -> list[ModelEntry]:
        """Returns what is served now, by id."""
        served = sorted(self._models(), key=lambda model: model.model_id)
        return [self._entry(model) for model in served]

    def find(self, model_id: str) -> ModelEntry:
        """Returns the entry of ``model_id``; empty takes the only one.

        Raises ModelNotFound, InvalidRequest, NoWorker.
        """
        entries = self.entries()
        if not model_id:
            return self._only(entries)
        if model_id in self._entries:
            return self._entries[model_id][1]
        self._require_any()
        names = ", ".join(repr(entry.model_id) for entry in entries) or "none now"
        raise ModelNotFound(f"the model {model_id!r} is not served here; served: {names}", "model")

    def preload(self) -> None:
        """Reads every tokenizer now (0.02–0.5 s each), so that no request waits for one. Raises CheckpointError."""
        for model_id, source in self._sources.items():
            if source is not None:
                self._texts[model_id] = load_text(source, vocab_size=0)

    def text(self, entry: ModelEntry) -> TextModel:
        """Returns the model's text side, loaded at the first call unless preloaded. Raises CheckpointError."""
        found = self._texts.get(entry.model_id)
        if found is None:
            if entry.source is None and entry.has_text:
                raise CheckpointError(
                    f"this router has no tokenizer of {entry.model_id!r}: start it with worker.model (--model) "
                    f"naming that model's directory, and worker.model_name = {entry.model_id!r}",
                    "model",
                )
            found = load_text(entry.source, entry.vocab_size, entry.eos_token_ids)
            self._texts[entry.model_id] = found
        return found

    def _only(self, entries: list[ModelEntry]) -> ModelEntry:
        self._require_any()
        known = entries or [entry for _, entry in self._entries.values()]
        if len(known) == 1:
            return known[0]
        names = ", ".join(repr(entry.model_id) for entry in known)
        raise InvalidRequest(f"name one of the models that are served: {names}", "model")

    def _require_any(self) -> None:
        if not self._entries:
            raise NoWorker("no worker has said yet which model it serves: try again soon", retry_after_s=1.0)

    def _entry(self, served: ServedModel) -> ModelEntry:
        seen, entry = self._entries.get(served.model_id, (None, None))
        if entry is None or seen != served:
            entry = self._made(served, created=entry.created if entry else int(self._wall_clock()))
            self._entries[served.model_id] = served, entry
        return entry

    def _made(self, served: ServedModel, created: int) -> ModelEntry:
        source = self._sources.get(served.model_id)
        return ModelEntry(
            model_id=served.model_id,
            max_model_len=served.max_model_len,
            vocab_size=served.vocab_size,
            eos_token_ids=served.eos_token_ids,
            adapters=served.adapters,
            source=source,
            defaults=generation_defaults(source),
            created=created,
            has_text=served.has_text,
        )


def generation_defaults(directory: Path | None) -> Json:
    """Returns the sampling fields that generation_config.json sets. Raises CheckpointError naming the file."""
    path = directory / "generation_config.json" if directory else None
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return {name: config[name] for name in _DEFAULTED if isinstance(config.get(name), int | float)}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error}", "generation_config") from None
