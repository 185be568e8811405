"""Tool calls in a model's text, found as the text comes: one file per format, its name is the format's.

Knows nothing of requests or JSON shapes. A parser turns text into events; what isn't a call is a ``TextEvent``.
A file has ``make() -> ToolParser`` and ``MARKS`` (what of it a chat template mentions).
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Protocol

import msgspec

from baton.protos.errors import ConfigError

AUTO = "auto"
USUAL = "hermes"  # for a template that names none of the marks


class TextEvent(msgspec.Struct, frozen=True):
    """Carries text for the reader."""

    text: str


class CallEvent(msgspec.Struct, frozen=True):
    """Says that the call number ``index`` begins."""

    index: int
    name: str


class ArgumentsEvent(msgspec.Struct, frozen=True):
    """Carries more of the JSON text that the call number ``index`` passes."""

    index: int
    text: str


Event = TextEvent | CallEvent | ArgumentsEvent


class ToolParser(Protocol):
    """Turns one answer's text into events."""

    def push(self, text: str) -> list[Event]:
        """Returns the events that became certain with ``text``."""

    def flush(self) -> list[Event]:
        """Returns the events that were held back, at the answer's end."""


def names() -> list[str]:
    """Returns the names of the formats there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def load(name: str, template: str = "") -> ModuleType:
    """Returns the format's module; "auto" takes the first whose marks ``template`` mentions. Raises ConfigError."""
    if name == AUTO:
        modules = [load(format_name) for format_name in names()]
        return next((m for m in modules if any(mark in template for mark in m.MARKS)), load(USUAL))
    if name not in names():
        raise ConfigError(f"no tool parser {name!r}; choose one of {', '.join(names())}", "router.tool_parser")
    return importlib.import_module(f"{__name__}.{name}")
