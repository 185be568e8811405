"""Parsers of tool calls in a model's text, as the text arrives: one module per format, named as the format.

Knows nothing of requests or JSON shapes. A parser turns text into events; what isn't a call is a ``TextEvent``. A
module has ``make(context) -> ToolParser``, ``MARKS`` (markup of answers), ``ARGUMENTS`` (the key of a call's
arguments) and ``lazy_rules`` (``lazy_calls``), by which a grammar binds calls amid free text. A chat template is
recognized by the ``SIGNS`` of a module that has some, the longest first, then by the marks of the others.
``READS_THOUGHTS`` says that a module's parser tells thoughts apart, too, so that no reasoning parser stands before
it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

import msgspec

from baton.protos.errors import ConfigError
from baton.protos.json import Json
from baton.router.text.tool_events import Event

AUTO = "auto"
USUAL = "hermes"  # for a template that names none of the marks


class ParserContext(msgspec.Struct, frozen=True):
    """Says what a parser may need to know beside the answer's text.

    ``schemas`` are the JSON schemas of the arguments by tool, which tell numbers from text where a format has both
    bare. ``prompt`` is the rendered prompt. Without ``reads_calls`` or ``splits_thoughts`` a format that has both
    gives that part as text.
    """

    schemas: Mapping[str, Json] = {}
    prompt: str = ""
    reads_calls: bool = True
    splits_thoughts: bool = True


class ToolParser(Protocol):
    """Turns one answer's text into events, as it arrives."""

    @property
    def closed(self) -> bool:
        """Returns whether the text so far has all of the last call that it began."""

    def push(self, text: str) -> list[Event]:
        """Returns the events that ``text``, the next part of the answer, makes certain."""

    def flush(self) -> list[Event]:
        """Returns the events that were held back; call it at the answer's end."""


def names() -> list[str]:
    """Returns the names of the tool-call formats."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


@functools.lru_cache(maxsize=64)  # every chat call asks
def load(name: str, template: str = "") -> ModuleType:
    """Returns the module of format ``name``; "auto" takes the one whose longest sign, else mark, ``template``
    contains, else USUAL.

    Raises ConfigError for an unknown name.
    """
    if name == AUTO:
        modules = [load(format_name) for format_name in names()]
        signed = [m for m in modules if hasattr(m, "SIGNS")]
        signs = [(m, sign) for m in signed for sign in m.SIGNS]
        signs.sort(key=lambda found: -len(found[1]))  # a section's sign says more than a tag that two formats have
        signs += [(m, mark) for m in modules if m not in signed for mark in m.MARKS]
        return next((m for m, sign in signs if sign in template), load(USUAL))
    if name not in names():
        raise ConfigError(f"no tool parser {name!r}; choose one of {', '.join(names())}", "router.tool_parser")
    return importlib.import_module(f"{__name__}.{name}")


def reads_thoughts(module: ModuleType) -> bool:
    """Returns whether the format's parser tells thoughts apart, too, so that none stands before it."""
    return getattr(module, "READS_THOUGHTS", False)
