"""Finds one GGUF file of a Hugging Face repository: ``ORG/REPO:NAME``, as vLLM and llama.cpp spell it.

Knows nothing of what files hold. NAME is a file's name, or a part that only that file of the repository has, such
as Q4_K_M.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from baton.gguf_files.folder import SUFFIX, TOKENIZER
from baton.protos.errors import CheckpointError

SPELLED = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(?P<name>[\w./-]+)")
PARTS = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
ETAG_TIMEOUT_S = 5.0  # seconds that the hub has to answer before the cached files are taken


def is_on_hub(model: str) -> bool:
    """Returns whether ``model`` has the form ``ORG/REPO:NAME`` of a GGUF file on the hub."""
    return SPELLED.fullmatch(model) is not None


@cache
def fetched(model: str) -> Path:
    """Returns the path of the file that ``model`` (``ORG/REPO:NAME``) names, downloaded if it isn't cached.

    Raises CheckpointError if the hub can't be reached and nothing is cached, or if NAME doesn't name exactly one
    file.
    """
    found = SPELLED.fullmatch(model)
    assert found is not None, "is_on_hub was asked first"
    repo, name = found["repo"], found["name"]
    try:
        return _download(repo, name)
    except CheckpointError:
        raise
    except Exception as online:  # the hub's errors share no base class
        path = _cached(repo, name)
        if path is None:
            text = f"{model}: the hub gave {type(online).__name__}: {online}"
            raise CheckpointError(text, "model") from online
        return path


def chosen(names: Sequence[str], wanted: str, repo: str) -> str:
    """Returns the one file of ``names`` that ``wanted`` names. Raises CheckpointError if there isn't exactly
    one.
    """
    files = sorted(name for name in names if name.lower().endswith(SUFFIX))
    exact = [name for name in files if name.lower() in (wanted.lower(), f"{wanted}{SUFFIX}".lower())]
    tag = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-._/]|$)", re.IGNORECASE)
    found = exact or [name for name in files if tag.search(name)]
    if len(found) == 1 and not PARTS.search(found[0]):
        return found[0]
    if found and all(PARTS.search(name) for name in found):
        text = "is split in several files, which aren't read; join them by llama-gguf-split --merge, and name that"
        raise CheckpointError(f"{repo}: {wanted} {text}", "model")
    what = f"names {len(found)} files: {', '.join(found)}" if found else "names none"
    raise CheckpointError(f"{repo}: {wanted} {what}; it has {', '.join(files) or 'no .gguf'}", "model")


def _download(repo: str, name: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download  # slow to import

    names = HfApi().list_repo_files(repo)
    file = chosen(names, name, repo)
    beside = f"{file.rpartition('/')[0]}/{TOKENIZER}".lstrip("/")
    if beside in names:  # it comes before what the header says
        hf_hub_download(repo, beside, etag_timeout=ETAG_TIMEOUT_S)
    return Path(hf_hub_download(repo, file, etag_timeout=ETAG_TIMEOUT_S))


def _cached(repo: str, name: str) -> Path | None:
    """Returns the file in the local cache's newest snapshot; None if the repository isn't cached."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
    except Exception:  # not cached
        return None
    names = [str(path.relative_to(folder)) for path in folder.rglob(f"*{SUFFIX}")]
    return folder / chosen(names, name, repo)
