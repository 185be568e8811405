"""The drafter of a decode worker's speculative decoding: speculators by name, those with a model loaded beside the
target included.

Knows nothing of loops or channels. The KV of a draft model, or of some of the target's own layers, takes at most an
eighth of the target's.
"""

from __future__ import annotations

import json
import logging
from importlib import import_module
from pathlib import Path

from baton.engine.abilities import Internals, branches_of, internals_of, keeps_bits
from baton.engine.checkpoints.hub import locate
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import ModelSpec, Runner
from baton.engine.speculate.draft import MOST_DRAFTS, Speculator, StateSpeculator
from baton.engine.speculate.draft_model import DraftModel, require_same_tokens
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.judge import MOST_ROWS
from baton.engine.speculate.names import DRAFT, MEDUSA, NONE, SELF, self_layers, speculators, without_auto
from baton.engine.speculate.text_search import GAP
from baton.kv.layout.room import prompt_room
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS
from baton.worker.spec import EngineSpec

log = logging.getLogger("baton.engine")

KV_SHARE = 8  # a draft model gets this fraction (one in eight) of the target's bytes of KV
LEAST_PAGES = 64  # pages that it gets in any case
MOST_VOCAB = ord(GAP)  # tokens of a vocabulary whose texts can be searched


def most_drafts(names: str, sequences: int) -> int:
    """Returns the most drafts of ``sequences`` sequences in one step, by the speculators ``names`` that a GPU's
    worker may use: "auto" drafts nothing there.
    """
    return 0 if without_auto(names) == NONE else min(MOST_ROWS, MOST_DRAFTS * sequences)


def make_drafter(
    names: str,
    engine: EngineSpec,
    runner: Runner,
    pages: int,
    control_share: float = 0.0,
    by_rejection: bool = False,
    kept: dict[str, Speculator] | None = None,
) -> Drafter | None:
    """Returns the drafter that uses the speculators ``names`` for the model of ``runner``, whose KV pool has
    ``pages`` pages; None for "none", and for "auto" where no draft can be taken.

    ``control_share`` of the steps draft nothing, for comparison; ``by_rejection`` is ``Drafter``'s. Speculators
    that have a model, by name, are taken from ``kept`` and put there, because an engine may draft in several of its
    roles. Raises ConfigError, and CheckpointError for unreadable files.
    """
    kept = {} if kept is None else kept
    names = _usable(names, runner)
    if runner.spec.vocab_size > MOST_VOCAB and names != NONE:
        text = f"speculation {names}: texts are searched as strings, which have at most {MOST_VOCAB} tokens"
        raise ConfigError(
            f"{text}, and this model's vocabulary has {runner.spec.vocab_size}; use none", "speculation"
        )
    if runner.spec.layout.states and names != NONE:
        text = f"speculation {names}: this model keeps recurrent state, which can't be rolled back; use none"
        raise ConfigError(text, "speculation")

    def load(name: str) -> Speculator:
        if name not in kept:
            kept[name] = _of_a_model(name, engine, runner, pages)
        return kept[name]

    found = speculators(names, load)
    _tap(names, found, runner)
    trees = branches_of(runner)
    return Drafter(found, control_share=control_share, by_rejection=by_rejection, trees=trees) if found else None


def _usable(names: str, runner: Runner) -> str:
    """Returns ``names`` without "auto" if drafts can't be rolled back, or might change an answer's bits."""
    asked = without_auto(names)
    why = _hindrance(runner)
    if names == asked or not why:
        return names
    log.info("speculation auto: no drafts of its own, because %s", why)
    return asked


def _hindrance(runner: Runner) -> str:
    """Returns why "auto" can't draft for this runner's model, in words; empty if it can."""
    if runner.spec.layout.states:
        return "the model keeps recurrent state, which can't be rolled back"
    if runner.spec.vocab_size > MOST_VOCAB:
        return f"the vocabulary has over {MOST_VOCAB} tokens"
    return "" if keeps_bits(runner) else "what computes here may round rows by what is beside them"


def _of_a_model(name: str, engine: EngineSpec, runner: Runner, pages: int) -> Speculator:
    if engine.paced_profile:
        text = f"speculation {name}: a paced engine has no tokens that a model could draft"
        raise ConfigError(f"{text}; use prompt_lookup or suffix", "speculation")
    if name.startswith(DRAFT):
        return _draft_model(name.removeprefix(DRAFT), engine, runner.spec, pages)
    if (layers := self_layers(name)) is not None:
        drafting = _internals(name, runner).shallow(layers)
        return DraftModel(drafting, _pages(drafting.spec, runner.spec, pages), name=SELF)
    return _heads(name, engine, runner)


def _heads(name: str, engine: EngineSpec, runner: Runner) -> Speculator:
    """Heads that were trained beside the model. What computes them is imported here, because it needs torch."""
    inside = _internals(name, runner)
    files, heads = (import_module(f"baton.engine.speculate.heads.{each}") for each in ("files", "medusa"))
    target = files.Target(inside.hidden, runner.spec.vocab_size, inside.layers)
    pack = files.packing(engine.dtype, engine.quantization, engine.activations)
    path = name.partition(":")[2]
    if name.startswith(MEDUSA):
        medusa: Speculator = heads.Medusa(heads.read_medusa(path, target, pack), inside.layers)
        return medusa
    layer = import_module("baton.engine.speculate.heads.eagle3_layer")
    made = layer.Eagle3Layer(files.HeadFiles(path), target, inside.embeddings, pack)
    eagle: Speculator = import_module("baton.engine.speculate.heads.eagle3").Eagle3(made, target.vocab)
    return eagle


def _tap(names: str, found: tuple[Speculator, ...], runner: Runner) -> None:
    """Has the runner give the states that a speculator looks at."""
    seeing = [speculator for speculator in found if isinstance(speculator, StateSpeculator)]
    if len(seeing) > 1:
        text = f"speculation {names}: one of {', '.join(one.name for one in seeing)} can look at the model's states"
        raise ConfigError(f"{text}; name one of them", "speculation")
    for one in seeing:
        _internals(names, runner).tap(one.layers, one.every_row)


def _internals(name: str, runner: Runner) -> Internals:
    found = internals_of(runner)
    if found is None:
        text = f"speculation {name}: it needs the inside of the model, which the native step on one CPU rank gives"
        raise ConfigError(f"{text}; use prompt_lookup, suffix, lookahead or draft:MODEL", "speculation")
    return found


def _draft_model(model: str, engine: EngineSpec, target: ModelSpec, pages: int) -> Speculator:
    _require_same_text(model, engine.model)
    runner = load_runner(
        EngineConfig(
            model=model,
            dtype=engine.dtype,  # type: ignore[arg-type]  # load_runner checks it
            device=engine.device,  # type: ignore[arg-type]
            threads=engine.threads or None,
            quantization=engine.quantization,  # type: ignore[arg-type]
            quantization_overrides=engine.quantization_overrides,
            activations=engine.activations,  # type: ignore[arg-type]
            max_model_len=engine.max_model_len or None,
            cache_dir=engine.cache_dir,
            is_draft=True,
        )
    )
    try:
        if runner.spec.layout.states:
            text = f"speculation draft:{model}: a draft model can't keep recurrent state"
            raise ConfigError(text, "speculation")
        require_same_tokens(runner.spec, target, f"draft:{model}")
        return DraftModel(runner, _pages(runner.spec, target, pages))
    except BaseException:
        getattr(runner, "close", lambda: None)()  # a card's memory is given back by this alone
        raise


def _pages(draft: ModelSpec, target: ModelSpec, pages: int) -> int:
    """Returns the pages of the draft model: for as many tokens as the target's pool may hold, or an eighth of its
    bytes.
    """
    fits = pages * target.layout.page_bytes // KV_SHARE // draft.layout.page_bytes
    most = prompt_room(target.layout, pages) // BLOCK_TOKENS
    return max(LEAST_PAGES, min(most, fits))


def _require_same_text(draft: str, target: str) -> None:
    """Raises ConfigError where the two models' tokenizers give other ids to the same text."""
    mine, theirs = (locate(model) / "tokenizer.json" for model in (draft, target))
    if not (mine.is_file() and theirs.is_file()) or _vocabulary(mine) != _vocabulary(theirs):
        text = f"speculation draft:{draft}: its tokenizer.json isn't that of {target}"
        raise ConfigError(f"{text}; a draft model must have the model's tokenizer", "speculation")


def _vocabulary(path: Path) -> object:
    """Tokens and their ids, and how text is cut into them."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}", "speculation") from None
    return [found.get(part) for part in ("model", "added_tokens", "pre_tokenizer", "normalizer")]
