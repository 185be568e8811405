"""The catalog of served models and what API surfaces need of each: limits, tokenizer and template, default
sampling.

Knows nothing of workers: ``models`` says what is served, ``sources`` where a model's files are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from baton.cluster.adapters import AdapterEntry
from baton.protos.errors import CheckpointError, Forbidden, InvalidRequest, ModelNotFound, NoWorker
from baton.protos.json import Json
from baton.router.access.caller import CALLER
from baton.router.request.request import ServedModel
from baton.router.text.embedding_style import EmbeddingStyle, embedding_style
from baton.router.text.encoder_style import EncoderStyle, encoder_style
from baton.router.text.model import TextModel, load_text

log = logging.getLogger("baton.router")
MOST_NAMED = 20  # names that the error of an unknown one lists
LoadText = Callable[[Path | None, int, Sequence[int]], TextModel]  # of a directory, a vocabulary's size and ends
_DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ModelEntry(msgspec.Struct, frozen=True):
    """Describes one served model, or an ``adapter`` on it.

    ``model_id`` is the base model's, also for an adapter. ``created`` is Unix seconds. ``source`` is the directory
    of the model's files, ``defaults`` the sampling fields of its generation_config.json. ``has_text``: its tokens
    stand for text, so it can't be served without its tokenizer. ``encoder`` is None for a model that writes.
    """

    model_id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    source: Path | None = None
    defaults: Json = {}
    created: int = 0
    has_text: bool = False
    adapter: AdapterEntry | None = None
    embedding: EmbeddingStyle = EmbeddingStyle()
    encoder: EncoderStyle | None = None

    @property
    def name(self) -> str:
        """Returns the name that clients use: the adapter's, or the model's."""
        return self.adapter.name if self.adapter is not None else self.model_id

    @property
    def adapter_id(self) -> str:
        """Returns the id of the adapter's content; "" for a base model.

        Raises NoWorker while no worker has read the content.
        """
        if self.adapter is None:
            return ""
        if not self.adapter.digest:
            raise NoWorker(f"no worker has loaded adapter {self.name!r} yet: try again soon", retry_after_s=1.0)
        return self.adapter.adapter_id


class AdapterSource(Protocol):
    """Knows which adapters clients may name; ``router.adapters.registry.AdapterRegistry`` implements it."""

    def served(self) -> Mapping[str, AdapterEntry]:
        """Returns the adapters by name."""

    def look(self) -> Awaitable[None]:
        """Reads the changes of other routers now."""

    @property
    def is_complete(self) -> bool:
        """Returns whether other routers' changes were read at least once; before that, an unknown name may be an
        adapter's.
        """


class NoAdapters:
    """Implements AdapterSource for a router that serves base models only."""

    is_complete = True

    def served(self) -> Mapping[str, AdapterEntry]:
        """Returns an empty mapping, because there are no adapters."""
        return {}

    async def look(self) -> None:
        """Does nothing, because there is nothing to read."""


class ModelCatalog:
    """Knows the models of ``models()`` by id, and the adapters on them; ``sources`` gives the directory of a
    model's files (None or absent: no files). ``load`` reads its tokenizer and template, as ``load_text`` does.

    A model that was seen stays known, so that a request while its workers restart gets 503, not 404. Other tenants'
    adapters are unknown to a caller; what its key may not use isn't listed to it.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[ServedModel]],
        sources: Mapping[str, Path | None] | None = None,
        wall_clock: Callable[[], float] = lambda: 0.0,
        adapters: AdapterSource = NoAdapters(),
        load: LoadText = load_text,
    ) -> None:
        self._models, self._adapters = models, adapters
        self._sources = dict(sources or {})
        self._wall_clock, self._load = wall_clock, load
        self._entries: dict[str, tuple[ServedModel, ModelEntry]] = {}
        self._texts: dict[str, TextModel] = {}
        self._clashes: set[str] = set()  # names of adapters that are models' as well

    def entries(self) -> list[ModelEntry]:
        """Returns what is served now and the caller may use: models by id, then adapters."""
        adapters = (self._on(entry) for entry in self._adapters.served().values())
        found = [*self._model_entries(), *(entry for entry in adapters if entry is not None)]
        return [entry for entry in found if _may_use(entry)]

    async def described(self, name: str) -> ModelEntry:
        """Returns the entry of a model or adapter ``name`` for a caller who asks about it. Raises as ``resolve``,
        and Forbidden if the caller's key may not use it.
        """
        found = await self.resolve(name)
        if not _may_use(found):
            raise Forbidden(f"this key may not use {found.name!r}; /v1/models lists what it may", "model")
        return found

    async def resolve(self, name: str, adapter: str = "") -> ModelEntry:
        """Returns the entry of a model or adapter ``name``; "" means the only model, or the adapter that the
        caller's key is bound to.

        ``adapter`` names one on model ``name``. An unknown name is looked up in the registry that routers share.
        Raises ModelNotFound, InvalidRequest, NoWorker.
        """
        try:
            return self._named(name, adapter)
        except ModelNotFound:
            await self._adapters.look()
        try:
            return self._named(name, adapter)
        except ModelNotFound as error:
            if self._adapters.is_complete:
                raise
            text = f"{error.message}, or is an adapter that can't be read yet because Redis is away"
            raise NoWorker(text, retry_after_s=1.0) from None

    def find(self, name: str) -> ModelEntry:
        """Returns the entry of a model or adapter that this router knows already; "" means the only model.

        Raises ModelNotFound, InvalidRequest if a name is needed, NoWorker if no model is known yet.
        """
        models = self._model_entries()
        if not name:
            return self._only(models)
        adapter = self._adapters.served().get(name)
        found = self._on(adapter) if adapter is not None else None
        if found is not None:
            self._warn_of_clash(name)
            return found
        if name in self._entries:
            return self._entries[name][1]
        self._require_any()
        names = ", ".join(repr(entry.name) for entry in self.entries()[:MOST_NAMED]) or "none now"
        raise ModelNotFound(f"the model {name!r} is not served here; served: {names}", "model")

    def model_of(self, name: str) -> str:
        """Returns the id of the base model that a call of the caller's which names ``name`` is for; "" where this
        router doesn't know it yet, or where a name is needed. Doesn't raise; may be called from any thread.
        """
        key = CALLER.get().key
        if not name and (key is None or not key.adapter):
            known = [model.model_id for model in self._models()] or list(self._entries)
            return known[0] if len(known) == 1 else ""
        adapter = self._adapters.served().get(name or (key.adapter if key is not None else ""))
        if adapter is not None and CALLER.get().may_use(adapter.tenant):
            return adapter.model_id
        return name if name in self._entries or any(model.model_id == name for model in self._models()) else ""

    def preload(self) -> None:
        """Reads the tokenizers of all ``sources`` now (0.02–0.5 s each), so that no request waits for one.

        Raises CheckpointError.
        """
        for model_id, source in self._sources.items():
            if source is not None:
                self._texts[model_id] = self._load(source, 0, ())

    def text(self, entry: ModelEntry) -> TextModel:
        """Returns the model's tokenizer and chat template, loaded on first use. Raises CheckpointError."""
        found = self._texts.get(entry.model_id)
        if found is None:
            if entry.source is None and entry.has_text:
                raise CheckpointError(
                    f"this router has no tokenizer of {entry.model_id!r}: start it with worker.model (--model) "
                    f"naming that model's directory, and worker.model_name = {entry.model_id!r}",
                    "model",
                )
            found = self._load(entry.source, entry.vocab_size, entry.eos_token_ids)
            self._texts[entry.model_id] = found
        return found

    def _warn_of_clash(self, name: str) -> None:
        """Logs once that a model came under the name of an adapter, which keeps it: no client's answers change."""
        if name in self._entries and name not in self._clashes:
            self._clashes.add(name)
            log.warning(
                "%r is an adapter's name and a model's: it means the adapter; serve the model as another", name
            )

    def _named(self, name: str, adapter: str) -> ModelEntry:
        key = CALLER.get().key
        bound = key.adapter if key is not None and not adapter else ""
        if bound and not name:
            return self.find(bound)
        found = self.find(name)
        if adapter:
            on = self.find(adapter)
            if on.adapter is None or found.model_id != on.model_id:
                raise ModelNotFound(f"adapter {adapter!r} is not served with {found.name!r}", "adapter")
            if found.adapter is not None and found.name != on.name:
                text = f"the model {found.name!r} is an adapter, and {on.name!r} another: name one of them"
                raise InvalidRequest(text, "adapter")
            return on
        if bound and found.adapter is None and (own := self.find(bound)).model_id == found.model_id:
            return own
        return found

    def _model_entries(self) -> list[ModelEntry]:
        return [self._entry(model) for model in sorted(self._models(), key=lambda model: model.model_id)]

    def _on(self, adapter: AdapterEntry) -> ModelEntry | None:
        """The entry of an adapter; None where its model isn't known, or where it is none of the caller's."""
        base = self._entries.get(adapter.model_id)
        if base is None or not CALLER.get().may_use(adapter.tenant):
            return None
        return msgspec.structs.replace(base[1], adapter=adapter, created=int(adapter.at) or base[1].created)

    def _only(self, entries: list[ModelEntry]) -> ModelEntry:
        self._require_any()
        known = entries or [entry for _, entry in self._entries.values()]
        if len(known) == 1:
            return known[0]
        names = ", ".join(repr(entry.model_id) for entry in known if _may_use(entry)) or "none to this key"
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
            source=source,
            defaults=generation_defaults(source),
            created=created,
            has_text=served.has_text,
            embedding=embedding_style(source),
            encoder=encoder_style(source),
        )


def _may_use(entry: ModelEntry) -> bool:
    key = CALLER.get().key
    return key is None or key.allows(entry.model_id, _adapter_of(entry))


def _adapter_of(entry: ModelEntry) -> str:
    """Returns the name of an entry's adapter; "" for a base model."""
    return "" if entry.adapter is None else entry.adapter.name


def generation_defaults(directory: Path | None) -> Json:
    """Returns the sampling fields that ``directory``'s generation_config.json sets; {} without one.

    Raises CheckpointError naming the file.
    """
    path = directory / "generation_config.json" if directory else None
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return {name: config[name] for name in _DEFAULTED if isinstance(config.get(name), int | float)}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error}", "generation_config") from None
