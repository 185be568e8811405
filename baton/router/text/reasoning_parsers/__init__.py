"""A model's thinking, kept apart from its answer: one file per format, its name is the format's.

Knows nothing of requests. A file has ``make(thinking) -> ReasoningParser`` (``thinking``: the prompt itself ended
inside the thought) and ``MARKS`` (what of it a chat template mentions).
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Protocol

from baton.protos.errors import ConfigError

AUTO, NONE = "auto", "none"


class ReasoningParser(Protocol):
    """Splits one answer's text into (thought, answer)."""

    def push(self, text: str) -> tuple[str, str]:
        """Returns what became certain with ``text``, of either."""

    def flush(self) -> tuple[str, str]:
        """Returns what was held back, at the answer's end."""


def names() -> list[str]:
    """Returns the names of the formats there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def load(name: str, template: str = "") -> ModuleType | None:
    """Returns the format's module; "auto" the one that ``template`` mentions; None for none. Raises ConfigError."""
    if name == NONE:
        return None
    if name == AUTO:
        modules = [importlib.import_module(f"{__name__}.{n}") for n in names()]
        return next((m for m in modules if any(mark in template for mark in m.MARKS)), None)
    if name not in names():
        choices = ", ".join([AUTO, NONE, *names()])
        raise ConfigError(f"no reasoning parser {name!r}; choose one of {choices}", "router.reasoning_parser")
    return importlib.import_module(f"{__name__}.{name}")
