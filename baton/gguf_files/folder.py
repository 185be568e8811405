"""Makes a directory in Hugging Face layout for a GGUF file: config.json, tokenizer.json, and a link to each part.

Knows nothing of engines. Directories lie in the cache, under ``gguf``; a changed file gets another directory. A
tokenizer.json beside the file is used, else one is made from the header.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from baton.gguf_files.config import config_of
from baton.gguf_files.header import GgufHeader
from baton.gguf_files.parts import PART, names_of, paths_of
from baton.gguf_files.tokenizer import GgufText
from baton.places import cache_dir
from baton.protos.errors import CheckpointError

SUFFIX = ".gguf"
MODEL, CONFIG, TOKENIZER = "model.gguf", "config.json", "tokenizer.json"
FORM = 2  # of the files that are made, part of their directory's name


def is_gguf(model: str) -> bool:
    """Returns whether ``model`` looks like the path of a GGUF file."""
    return model.lower().endswith(SUFFIX)


def folder_of(model: str | Path) -> Path:
    """Returns the directory for a GGUF file, or for all parts of a model if it names one, which is made if needed.
    Raises CheckpointError naming the file.
    """
    parts = paths_of(Path(model).expanduser().absolute())  # not where links lead: what lies beside the name counts
    beside = parts[0].parent / TOKENIZER
    changed = f" {beside} {beside.stat().st_mtime_ns}" if beside.is_file() else ""
    known = f"{FORM}{''.join(f' {_state(part)}' for part in parts)}{changed}"
    folder = cache_dir() / "gguf" / f"{parts[0].stem}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        _make(parts, folder)
    return folder


def _state(part: Path) -> str:
    found = part.stat()
    return f"{part.resolve()} {found.st_size} {found.st_mtime_ns}"


def _make(parts: list[Path], folder: Path) -> None:
    """Writes all files to a temporary directory first, so that ``folder`` is complete or absent."""
    path = parts[0]
    header = GgufHeader(path)
    files = {CONFIG: config_of(header)} | _text_files(header, path.parent / TOKENIZER)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            own = Path(place) / "made"
            own.mkdir()
            for name, content in files.items():
                (own / name).write_text(
                    content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
                )
            for name, part in zip(names_of(_link(path.name)), parts, strict=True):
                (own / name).symlink_to(part.resolve())
            own.rename(folder)
    except OSError as error:
        if not (folder / CONFIG).is_file():  # else another process was first
            raise CheckpointError(f"{folder} can't be written: {error}; set BATON_CACHE_DIR", "model") from error


def _link(name: str) -> str:
    found = PART.search(name)
    return MODEL if found is None else f"{Path(MODEL).stem}-{found['number']}-of-{found['count']}{SUFFIX}"


def _text_files(header: GgufHeader, beside: Path) -> dict[str, object]:
    """Returns the contents of the tokenizer's files by name; without tokens in the header, no tokenizer is made."""
    text = GgufText(header)
    ends = {"generation_config.json": {"eos_token_id": text.ends()}} if text.ends() else {}
    if beside.is_file():
        return {**ends, TOKENIZER: beside.read_text(encoding="utf-8"), "tokenizer_config.json": text.settings()}
    if not text.tokens:
        return dict(ends)
    return {**ends, TOKENIZER: text.tokenizer(), "tokenizer_config.json": text.settings()}
