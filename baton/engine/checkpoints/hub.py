"""Finds a model's files: a directory, a GGUF file, or either on the Hugging Face hub. Torch-free.

Knows nothing of what the files hold.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from baton.gguf_files.folder import folder_of, is_gguf
from baton.gguf_files.hub import fetched, is_on_hub, told_files
from baton.protos.errors import CheckpointError

WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")
OTHER_COPIES = ("original/*", "metal/*", "consolidated*")  # of the weights, in forms that aren't read
ETAG_TIMEOUT_S = 5.0  # seconds that the hub has to answer before the cached files are taken


def locate(model: str) -> Path:
    """Returns the local directory of ``model`` (a directory, a GGUF file or a hub id), downloading it if needed.
    Raises CheckpointError naming it.
    """
    path = Path(known_place(model)).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        return folder_of(path)
    if is_on_hub(model):
        return folder_of(fetched(model))
    return _from_hub(model)


def known_place(model: str) -> str:
    """Returns ``model`` if it names what is here, or may be on the hub, which isn't asked. Raises CheckpointError
    naming it.
    """
    path = Path(model).expanduser()
    if path.is_dir() or (is_gguf(model) and path.exists()):
        return model
    if path.exists():
        text = f"{model} is a file; name the directory that holds config.json, or a .gguf file"
        raise CheckpointError(text, "model")
    if not is_on_hub(model) and _looks_like_path(model):
        raise CheckpointError(f"{model}: no such directory", "model")
    return model


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "~", os.sep)) or model.count("/") != 1 or model.endswith("/")


@cache
def _from_hub(model: str) -> Path:
    """Returns the hub's newest snapshot, or the cached one if the hub can't be reached.

    Raises CheckpointError, also for a repository that has GGUF files alone.
    """
    found = _snapshot(model)
    if not (found / "config.json").is_file() and (files := told_files(model)):
        raise CheckpointError(f"{model} has no config.json; {files}", "model")
    return found


def _snapshot(model: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, needed for hub ids only

    try:
        return Path(
            snapshot_download(
                model,
                allow_patterns=list(WANTED),
                ignore_patterns=list(OTHER_COPIES),
                etag_timeout=ETAG_TIMEOUT_S,
            )
        )
    except Exception as online:
        try:
            return Path(snapshot_download(model, local_files_only=True))
        except Exception:
            raise CheckpointError(
                f"{model} is no directory here, and the hub gave: {type(online).__name__}: {online}", "model"
            ) from online
