"""What a decode worker drafts tokens with: speculators by name, a draft model loaded beside the target.

Knows nothing of loops or channels. The draft model's KV takes an eighth of the target's at most.
"""

from __future__ import annotations

import json
from pathlib import Path

from baton.engine.checkpoints.hub import locate
from baton.engine.load import EngineConfig, load_runner
from baton.engine.plan import ModelSpec
from baton.engine.speculate.draft import Speculator
from baton.engine.speculate.draft_model import DraftModel, require_same_tokens
from baton.engine.speculate.drafter import Drafter
from baton.engine.speculate.names import NONE, speculators
from baton.protos.errors import ConfigError
from baton.protos.nouns import BLOCK_TOKENS
from baton.worker.spec import EngineSpec

KV_SHARE = 8
LEAST_PAGES = 64


def make_drafter(names: str, engine: EngineSpec, target: ModelSpec, pages: int) -> Drafter | None:
    """Returns what drafts tokens by the speculators ``names`` for the model ``target``, which has ``pages`` pages.

    None where ``names`` says none. Raises ConfigError, and CheckpointError for a draft model that can't be read.
    """
    if target.layout.states and names != NONE:
        text = f"speculation {names}: this model keeps recurrent state, which can't be rolled back; use none"
        raise ConfigError(text, "speculation")
    found = speculators(names, lambda model: _draft_model(model, engine, target, pages))
    return Drafter(found) if found else None


def _draft_model(model: str, engine: EngineSpec, target: ModelSpec, pages: int) -> Speculator:
    if engine.paced_profile:
        text = f"speculation draft:{model}: a paced engine has no tokens that a model could draft"
        raise ConfigError(f"{text}; use prompt_lookup or suffix", "speculation")
    _require_same_text(model, engine.model)
    runner = load_runner(
        EngineConfig(
            model=model,
            dtype=engine.dtype,  # type: ignore[arg-type]  # load_runner checks it
            device=engine.device,  # type: ignore[arg-type]
            threads=engine.threads or None,
            quantization=engine.quantization,  # type: ignore[arg-type]
            cache_dir=engine.cache_dir,
        )
    )
    if runner.spec.layout.states:
        raise ConfigError(f"speculation draft:{model}: a draft model can't keep recurrent state", "speculation")
    require_same_tokens(runner.spec, target, f"draft:{model}")
    fits = pages * target.layout.page_bytes // KV_SHARE // runner.spec.layout.page_bytes
    most = pages * target.layout.block_tokens // BLOCK_TOKENS
    return DraftModel(runner, max(LEAST_PAGES, min(most, fits)))


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
