"""Writes docs/fields.md: what becomes of each field of other servers' and OpenAI's own requests, by endpoint.

The names come from tests/data/request_fields.json, the verdicts from the code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from baton.router.api.anthropic.schemas import CountTokensBody, MessagesBody, OutputConfig, Thinking
from baton.router.api.batch.routes import BatchBody
from baton.router.api.foreign_fields import HARMLESS_AT, reason, refusal
from baton.router.api.openai.embeddings import EmbeddingsBody
from baton.router.api.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, StreamOptions, TokenizeBody
from baton.router.api.openai.structured import NvExt, ResponseFormat, StructuredOutputs
from baton.router.api.request_body import RequestBody
from baton.router.api.responses.schemas import Reasoning, ResponsesBody, TextOptions

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("fields.md")
DATA = ROOT / "tests" / "data" / "request_fields.json"
BODIES: dict[str, type[RequestBody]] = {
    "completions": CompletionBody,
    "chat": ChatBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
    "count_tokens": CountTokensBody,
    "embeddings": EmbeddingsBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
    "batches": BatchBody,
    "structured_outputs": StructuredOutputs,
    "nvext": NvExt,
    "reasoning": Reasoning,
    "text": TextOptions,
    "stream_options": StreamOptions,
    "thinking": Thinking,
    "output_config": OutputConfig,
    "response_format": ResponseFormat,
}
FILES = frozenset({"file", "purpose"})  # a form, no body
NAMES = {
    "openai": "OpenAI",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "dynamo": "Dynamo",
    "anthropic": "Anthropic",
    "baton": "Baton alone",
}
Listed = dict[str, dict[str, list[str]]]


def listed() -> Listed:
    """Surface -> field -> who has it. Fields that only our bodies have are Baton's."""
    found: Listed = {surface: {} for surface in (*BODIES, "files")}
    for source, said in json.loads(DATA.read_text()).items():
        for surface, names in said["fields"].items():
            _add(found, surface, source, names.split())
    for surface in BODIES:
        _add(found, surface, "baton", declared(surface) - found[surface].keys())
    return found


def declared(surface: str) -> frozenset[str]:
    """Fields of the body, as clients name them."""
    if surface == "files":
        return FILES
    return frozenset(field.alias or name for name, field in BODIES[surface].model_fields.items())


def verdict(surface: str, field: str) -> str:
    """What becomes of it: "done", "refused" or "harmless"; "unknown" where nobody thought of it."""
    if field in HARMLESS_AT.get(surface, {}):
        return "harmless"
    if field in declared(surface):
        return "done"
    if reason(surface, field):
        return "harmless"
    return "refused" if refusal(surface, field) else "unknown"


def page() -> str:
    """The whole page."""
    return "\n".join([*_head(), *_tables(), *_reasons()]) + "\n"


def _add(found: Listed, surface: str, source: str, names: Iterable[str]) -> None:
    for name in names:
        found[surface].setdefault(name, []).append(source)


def _head() -> Iterator[str]:
    yield "# Fields of requests"
    yield ""
    yield "Written by `make reference` from the code and the request schemas of OpenAI, Anthropic, vLLM, SGLang"
    yield "and Dynamo (names, versions and commits: `tests/data/request_fields.json`)."
    yield ""
    yield "**done**: obeyed. **refused**: a 400 that names the field and says what to do instead. **harmless**:"
    yield "changes no answer, and is ignored. Empty: none of them has it there; it is ignored, and named in the"
    yield "header `x-baton-ignored`. null is always as if the field were absent. A test sends every one of them."


TABLES: dict[str, tuple[str, ...]] = {
    "Endpoints": ("completions", "chat", "responses", "messages", "embeddings", "tokenize"),
    "Other endpoints": ("count_tokens", "detokenize", "files", "batches"),
    **{f"Inside `{s}`": (s,) for s in BODIES if BODIES[s].inside},
}


def _tables() -> Iterator[str]:
    found = listed()
    for title, surfaces in TABLES.items():
        yield from _table(title, surfaces, found)


def _table(title: str, surfaces: tuple[str, ...], found: Listed) -> Iterator[str]:
    yield from (
        "",
        f"## {title}",
        "",
        "| field | of | " + " | ".join(surfaces) + " |",
        "|---" * (2 + len(surfaces)) + "|",
    )
    for field in _fields(surfaces, found):
        sources = {source for surface in surfaces for source in found[surface].get(field, ())}
        if len(sources) > 1:
            sources.discard("baton")
        names = ", ".join(name for source, name in NAMES.items() if source in sources)
        cells = [_cell(surface, field) for surface in surfaces]
        yield f"| `{field}` | {names} | " + " | ".join(cells) + " |"


def _fields(surfaces: Iterable[str], found: Listed) -> list[str]:
    return sorted({field for surface in surfaces for field in found[surface]})


def _cell(surface: str, field: str) -> str:
    found = verdict(surface, field)
    return "" if found == "unknown" else found


def _reasons() -> Iterator[str]:
    refused: dict[str, set[str]] = {}
    harmless: dict[str, set[str]] = {}
    found = listed()
    cells = [(s, f) for surfaces in TABLES.values() for f in _fields(surfaces, found) for s in surfaces]
    for surface, field in cells:
        told = refusal(surface, field)
        if verdict(surface, field) == "harmless":
            harmless.setdefault(reason(surface, field), set()).add(field)
        elif told is not None and verdict(surface, field) == "refused":
            refused.setdefault(told.remedy, set()).add(field)
    yield from _grouped("What to do instead of what is refused", refused)
    yield from _grouped("Why the rest is harmless", harmless)


def _grouped(title: str, groups: dict[str, set[str]]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| fields | |", "|---|---|")
    rows = [(", ".join(f"`{field}`" for field in sorted(fields)), why) for why, fields in groups.items()]
    for fields, why in sorted(rows):
        yield f"| {fields} | {why} |"


def main() -> int:
    """Write or compare."""
    text = page()
    if "--check" in sys.argv[1:]:
        if FILE.is_file() and FILE.read_text() == text:
            return 0
        print(f"{FILE.name} is stale: run make reference", file=sys.stderr)
        return 1
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
