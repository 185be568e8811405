"""Which context class a request is of, by the length of its prompt.

Knows nothing of queues or workers: a class is a name for metrics and for the queue it waits in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from baton.protos.errors import ConfigError


class ClassLike(Protocol):
    """A class as the config names it; ``max_tokens`` 0 takes the rest."""

    @property
    def name(self) -> str:
        """A label."""

    @property
    def max_tokens(self) -> int:
        """Prompt tokens, inclusive."""


class ContextClass(msgspec.Struct, frozen=True):
    """Prompts of at most ``max_tokens`` tokens; 0 takes the rest."""

    name: str
    max_tokens: int = 0


class ContextClasses:
    """Classes in rising order; the last one takes whatever is longer."""

    def __init__(self, classes: Iterable[ClassLike]) -> None:
        self._classes = [ContextClass(c.name, c.max_tokens) for c in classes]
        if not self._classes:
            raise ConfigError("give at least one context class (name, max_tokens)", "router.context_classes")
        limits = [c.max_tokens for c in self._classes[:-1]]
        if 0 in limits or limits != sorted(limits):
            raise ConfigError("context classes rise in max_tokens; 0 only in the last", "router.context_classes")

    @property
    def names(self) -> list[str]:
        """Every class, shortest first."""
        return [c.name for c in self._classes]

    def tag(self, prompt_tokens: int) -> str:
        """The first class that ``prompt_tokens`` fits in, or the last."""
        fitting = (c.name for c in self._classes if prompt_tokens <= c.max_tokens)
        return next(fitting, self._classes[-1].name)
