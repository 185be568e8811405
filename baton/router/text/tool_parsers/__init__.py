"""Parsers of tool calls in a model's text, as the text arrives: one module per format, named as the format.

Knows nothing of requests or JSON shapes. A parser turns text into events; what isn't a call is a ``TextEvent``. A
module has ``make() -> ToolParser``, ``MARKS`` (markup by which a chat template is recognized), ``ARGUMENTS`` (the
key of a call's arguments) and ``lazy_rules`` (``lazy_calls``), by which a grammar binds calls amid free text.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Protocol

from baton.protos.errors import ConfigError
from baton.router.text.tool_events import Event

AUTO = "auto"
USUAL = "hermes"  # for a template that names none of the marks


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


def load(name: str, template: str = "") -> ModuleType:
    """Returns the module of format ``name``; "auto" takes the first whose marks ``template`` contains, else USUAL.

    Raises ConfigError for an unknown name.
    """
    if name == AUTO:
        modules = [load(format_name) for format_name in names()]
        return next((m for m in modules if any(mark in template for mark in m.MARKS)), load(USUAL))
    if name not in names():
        raise ConfigError(f"no tool parser {name!r}; choose one of {', '.join(names())}", "router.tool_parser")
    return importlib.import_module(f"{__name__}.{name}")
