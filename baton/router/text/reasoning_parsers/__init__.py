"""Parsers that split a model's reasoning from its answer: one module per format, named as the format.

Knows nothing of requests. A module has ``make(thinking) -> ReasoningParser`` (``thinking``: the prompt itself ends
inside the reasoning) and ``MARKS`` (markup by which a chat template is recognized). Where thoughts take turns with
calls, it has ``JOINED`` in place of ``make``: the name of the tool parser that tells both apart.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType
from typing import Protocol

from baton.protos.errors import ConfigError

AUTO, NONE = "auto", "none"


class ReasoningParser(Protocol):
    """Splits one answer's text into (reasoning, answer)."""

    def push(self, text: str) -> tuple[str, str]:
        """Returns the (reasoning, answer) text that ``text``, the next part, makes certain."""

    def flush(self) -> tuple[str, str]:
        """Returns the (reasoning, answer) text that was held back; call it at the answer's end."""


def names() -> list[str]:
    """Returns the names of the reasoning formats."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


@functools.lru_cache(maxsize=64)  # every chat call asks
def load(name: str, template: str = "") -> ModuleType | None:
    """Returns the module of format ``name``; for "auto" the one whose marks ``template`` contains; None for "none"
    or no match.

    Raises ConfigError for an unknown name.
    """
    if name == NONE:
        return None
    if name == AUTO:
        modules = [importlib.import_module(f"{__name__}.{n}") for n in names()]
        return next((m for m in modules if any(mark in template for mark in m.MARKS)), None)
    if name not in names():
        choices = ", ".join([AUTO, NONE, *names()])
        raise ConfigError(f"no reasoning parser {name!r}; choose one of {choices}", "router.reasoning_parser")
    return importlib.import_module(f"{__name__}.{name}")


def joined(module: ModuleType) -> bool:
    """Returns whether a tool parser, ``module.JOINED``, tells the format's thoughts apart."""
    return hasattr(module, "JOINED")
