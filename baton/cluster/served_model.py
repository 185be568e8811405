"""The model that a cluster serves: a directory, a GGUF file, a Hugging Face id or a paced profile, and where its
tokenizer is.

Knows nothing of processes, placement or checkpoints' insides.
"""

from __future__ import annotations

import re
from pathlib import Path

import baton
from baton.cluster.config import BatonConfig
from baton.cluster.model_id import DEMO_NAME, model_id
from baton.gguf_files.folder import folder_of, is_gguf
from baton.gguf_files.hub import fetched, is_on_hub, told_files
from baton.protos.errors import CheckpointError

DEMO = Path(baton.__file__).resolve().parents[1] / "models" / DEMO_NAME
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # with its organization, which "gpt2" lacks
TEXT_FILES = ("tokenizer*", "*.json", "*.jinja")
TOKENIZER = "tokenizer.json"
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "*.tiktoken", "*.gguf")


def is_paced(config: BatonConfig) -> bool:
    """Returns whether workers run a paced engine, a simulation that needs no model."""
    return config.worker.device.startswith("paced:")


def resolve_model(config: BatonConfig) -> str:
    """Returns the directory, .gguf file or Hugging Face id to serve; "" for a paced engine without a model.

    Raises CheckpointError, also for a directory without a tokenizer.json.
    """
    model = config.worker.model
    if is_paced(config) and not model:
        return ""
    path = Path(model).expanduser() if model else DEMO
    if path.is_dir():
        return str((path if is_paced(config) else require_tokenizer(path)).resolve())
    if is_gguf(model) and path.is_file():
        if not is_paced(config):
            require_tokenizer(folder_of(path))
        return str(path.resolve())
    if not model or path.exists() or not (HUB_ID.fullmatch(model) or is_on_hub(model)):
        raise CheckpointError(
            f"there is no model directory at {path}: --model takes a directory with config.json, safetensors and "
            "tokenizer.json, a .gguf file, a Hugging Face id with its organization, such as Qwen/Qwen3-0.6B, or "
            "ORG/REPO:Q4_K_M of a repository with GGUF files",
            "worker.model",
        )
    return model


def text_directory(model: str, paced: bool = False) -> Path | None:
    """Returns the directory of the tokenizer's files (fetched from the hub for an id); None for a paced engine
    without one.

    Raises CheckpointError.
    """
    if not model:
        return None
    found = _text_folder(model)
    if paced and not (found / TOKENIZER).is_file():
        return None
    return require_tokenizer(found)


def _text_folder(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    if is_gguf(model) or is_on_hub(model):
        return folder_of(fetched(model) if is_on_hub(model) else model)
    return _text_from_hub(model)


def model_name(config: BatonConfig, model: str) -> str:
    """Returns the name by which clients ask for ``model`` (a directory, file, hub id, or "" for a paced engine)."""
    return model_id(config.worker.model_name, model, config.worker.device)


def require_tokenizer(directory: Path) -> Path:
    """Returns ``directory`` if it has a tokenizer.json. Raises CheckpointError naming what is there instead."""
    if (directory / TOKENIZER).is_file():
        return directory
    others = sorted(p.name for pattern in OTHER_TOKENIZERS for p in directory.glob(pattern))
    beside = f" (it has {', '.join(others)}, which is another format)" if others else ""
    raise CheckpointError(
        f"{directory} has no {TOKENIZER}{beside}, so text could be neither read nor written: copy it from the "
        "model's Hugging Face repository, or let transformers write it there: "
        "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)",
        "worker.model",
    )


def _text_from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(model, allow_patterns=list(TEXT_FILES)))
    except Exception as error:  # the hub's errors share no base class
        text = f"{model} is no directory here, and its tokenizer can't be fetched from the hub: {error}"
        raise CheckpointError(text, "worker.model") from None
    if not (found / TOKENIZER).is_file() and (files := told_files(model)):
        raise CheckpointError(f"{model} has no {TOKENIZER}; {files}", "worker.model")
    return found
