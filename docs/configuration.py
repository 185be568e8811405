"""Writes docs/configuration.md: every key of baton.toml with its type, default and meaning, from the code.

python docs/configuration.py            writes it
python docs/configuration.py --check    exit status 1 when the file is not what would be written
"""

from __future__ import annotations

import inspect
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from baton.cluster.config import BatonConfig, ContextClassSection, Pool

FILE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

<!-- Written by docs/configuration.py (make reference). Edit the descriptions in baton/cluster/sections. -->

A cluster reads `baton.toml` in the working directory (or `--config FILE`), then the environment, then flags; the
later wins. A key is `BATON_SECTION__KEY` in the environment: `BATON_ROUTER__PORT=9000`. Lists and tables are JSON
there. An unknown key is an error, and `baton check -f baton.toml` says what is wrong with a file without starting
anything. `baton serve`, `baton router`, `baton worker` and `baton place` all read the same file. Times are in
seconds, sizes in bytes. In the Helm chart the same sections are below `config:`, less what the chart sets itself
([deploy.md](deploy.md)).

"""
BOUNDS = {Ge: "at least", Gt: "more than", Le: "at most", Lt: "less than"}
LIMITS = {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt"}


def page() -> str:
    """The whole page."""
    parts = [HEAD.rstrip() + "\n"]
    for name, field in BatonConfig.model_fields.items():
        section = type(field.default)
        parts.append(f"## [{name}]\n\n{_text(section)}\n\n{_table(section)}\n")
    parts.append(
        f"## [[router.context_classes]]\n\n{_text(ContextClassSection)}\n\n{_table(ContextClassSection)}\n"
    )
    parts.append(f"## [[cluster.pools]]\n\n{_text(Pool)}\n\n{_table(Pool)}\n")
    return "\n".join(parts)


def _table(section: type[BaseModel]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {_type(field)} | {_default(field)} | {meaning} |")
    return "\n".join(rows)


def _text(section: type[BaseModel]) -> str:
    return " ".join(inspect.getdoc(section).split()).replace("``", "`")  # type: ignore[union-attr]


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{BOUNDS[type(bound)]} {getattr(bound, LIMITS[type(bound)]):,}".replace(",", " ")
        for bound in field.metadata
        if type(bound) in BOUNDS
    ]
    return ", ".join([_named(field.annotation), *bounds])


def _named(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " \\| ".join(f"`{choice}`" for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in (tuple, list):
        return f"list of {_named(typing.get_args(annotation)[0])}"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_named(part) for part in typing.get_args(annotation))
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(annotation, "table")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return ", ".join(f"`{part.name}` ({part.max_tokens or 'the rest'})" for part in value)
    return '`""`' if value == "" else f"`{json.dumps(value)}`"


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
