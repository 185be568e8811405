"""Which context class a request is of, by the length of its prompt.

Knows nothing of queues or workers: a class is a name for metrics and for the queue it waits in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from baton.protos.errors import ConfigError


class ContextClassLike(Protocol):
    """Describes a class as the config names it; ``max_tokens`` 0 takes the rest."""

    @property
    def name(self) -> str:
        """Returns the class's name, which labels its metrics."""

    @property
    def max_tokens(self) -> int:
        """Returns the most prompt tokens of the class, inclusive."""

    @property
    def slo_ttft_s(self) -> float:
        """Returns the TTFT SLO in seconds of requests that name none; 0: none."""

    @property
    def slo_tpot_s(self) -> float:
        """Returns the SLO per output token in seconds of requests that name none; 0: none."""


class ContextClass(msgspec.Struct, frozen=True):
    """Describes prompts of at most ``max_tokens`` tokens; 0 takes the rest. SLOs in seconds, 0: none."""

    name: str
    max_tokens: int = 0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0


class ContextClasses:
    """Tags prompts by classes in rising order; the last one takes whatever is longer."""

    def __init__(self, classes: Iterable[ContextClassLike]) -> None:
        self._classes = [ContextClass(c.name, c.max_tokens, c.slo_ttft_s, c.slo_tpot_s) for c in classes]
        if not self._classes:
            raise ConfigError("give at least one context class (name, max_tokens)", "router.context_classes")
        limits = [c.max_tokens for c in self._classes[:-1]]
        if 0 in limits or limits != sorted(limits):
            raise ConfigError("context classes rise in max_tokens; 0 only in the last", "router.context_classes")

    @property
    def names(self) -> list[str]:
        """Returns every class's name, shortest prompts first."""
        return [c.name for c in self._classes]

    def tag(self, prompt_tokens: int) -> str:
        """Returns the name of the first class that ``prompt_tokens`` fits in, or of the last."""
        return self.of(prompt_tokens).name

    def of(self, prompt_tokens: int) -> ContextClass:
        """Returns the first class that ``prompt_tokens`` fits in, or the last, with its SLOs."""
        return next((c for c in self._classes if prompt_tokens <= c.max_tokens), self._classes[-1])
