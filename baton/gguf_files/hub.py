"""Finds one GGUF model of a Hugging Face repository: ``ORG/REPO:NAME``, as vLLM and llama.cpp spell it.

Knows nothing of what files hold. NAME is a file's name, or a part that only that file of the repository has, such
as Q4_K_M. A model may be split into several files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from baton.gguf_files.folder import SUFFIX, TOKENIZER
from baton.gguf_files.parts import names_of
from baton.protos.errors import CheckpointError

SPELLED = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(?P<name>[\w./-]+)")
ETAG_TIMEOUT_S = 5.0  # seconds that the hub has to answer before the cached files are taken


def is_on_hub(model: str) -> bool:
    """Returns whether ``model`` has the form ``ORG/REPO:NAME`` of a GGUF file on the hub."""
    return SPELLED.fullmatch(model) is not None


@cache
def fetched(model: str) -> Path:
    """Returns the path of the file that ``model`` (``ORG/REPO:NAME``) names, of the first of several parts. What
    isn't cached is downloaded.

    Raises CheckpointError if the hub can't be reached and nothing is cached, or if NAME doesn't name exactly one
    model.
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


def chosen(names: Sequence[str], wanted: str, repo: str) -> list[str]:
    """Returns the one file of ``names`` that ``wanted`` names, or all parts of it. Raises CheckpointError if there
    isn't exactly one, or a part is missing.
    """
    files = sorted(name for name in names if name.lower().endswith(SUFFIX))
    exact = [name for name in files if name.lower() in (wanted.lower(), f"{wanted}{SUFFIX}".lower())]
    tag = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-._/]|$)", re.IGNORECASE)
    found = exact or [name for name in files if tag.search(name)]
    models = {tuple(names_of(name)) for name in found}
    if len(models) == 1:
        parts = list(models.pop())
        if missing := [name for name in parts if name not in files]:
            raise CheckpointError(
                f"{repo}: {wanted} has {len(parts)} parts, of which {missing[0]} is missing", "model"
            )
        return parts
    what = f"names {len(found)} files: {', '.join(found)}" if found else "names none"
    raise CheckpointError(f"{repo}: {wanted} {what}; it has {', '.join(files) or 'no .gguf'}", "model")


def _download(repo: str, name: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download  # slow to import

    names = HfApi().list_repo_files(repo)
    files = chosen(names, name, repo)
    beside = f"{files[0].rpartition('/')[0]}/{TOKENIZER}".lstrip("/")
    if beside in names:  # it comes before what the header says
        hf_hub_download(repo, beside, etag_timeout=ETAG_TIMEOUT_S)
    paths = [hf_hub_download(repo, file, etag_timeout=ETAG_TIMEOUT_S) for file in files]
    return Path(paths[0])


def told_files(repo: str) -> str:
    """Returns what to say of a repository that has GGUF files where others were looked for; "" if it has none, or
    can't be asked.
    """
    from huggingface_hub import HfApi

    try:
        files = sorted(name for name in HfApi().list_repo_files(repo) if name.lower().endswith(SUFFIX))
    except Exception:  # the hub's errors share no base class
        return ""
    return f"it has GGUF files: name one by {repo}:NAME, of {', '.join(files)}" if files else ""


def _cached(repo: str, name: str) -> Path | None:
    """Returns the file in the local cache's newest snapshot; None if nothing of the repository is cached.

    A snapshot is read as it lies (https://huggingface.co/docs/huggingface_hub/guides/manage-cache), because the
    client takes one for absent that lacks some of the repository's files.
    """
    from huggingface_hub import constants

    store = Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")
    try:
        folder = store / "snapshots" / (store / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    names = [str(path.relative_to(folder)) for path in folder.rglob(f"*{SUFFIX}")]
    return folder / chosen(names, name, repo)[0]
