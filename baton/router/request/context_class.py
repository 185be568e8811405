"""Context classes: requests classed by the length of their prompt, or by adapter.

Knows nothing of queues or workers: a class is a label for metrics and a queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from baton.protos.adapter_id import name_of
from baton.protos.errors import ConfigError
from baton.router.request.request import RouterRequest


class ContextClassLike(Protocol):
    """Declares a context class as the config has it."""

    @property
    def name(self) -> str:
        """Returns the class's name, which labels its metrics."""

    @property
    def max_tokens(self) -> int:
        """Returns the most prompt tokens of the class, inclusive; 0: no limit."""

    @property
    def slo_ttft_s(self) -> float:
        """Returns the default TTFT SLO in seconds, for requests that give none; 0: none."""

    @property
    def slo_tpot_s(self) -> float:
        """Returns the default SLO in seconds per output token, for requests that give none; 0: none."""

    @property
    def adapters(self) -> Sequence[str]:
        """Returns the names of the adapters whose requests the class takes; empty: requests on any adapter or
        none.
        """


class ContextClass(msgspec.Struct, frozen=True):
    """Describes the class of prompts of at most ``max_tokens`` tokens (0: no limit). SLOs are in seconds, 0: none.

    A class with ``adapters`` takes only requests on these, and takes precedence over classes without.
    """

    name: str
    max_tokens: int = 0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    adapters: tuple[str, ...] = ()


class ContextClasses:
    """Classes prompts by their length and adapter; ``classes`` come in rising order of ``max_tokens``.

    Raises ConfigError for another order, or if every class is bound to adapters.
    """

    def __init__(self, classes: Iterable[ContextClassLike]) -> None:
        every = [ContextClass(c.name, c.max_tokens, c.slo_ttft_s, c.slo_tpot_s, tuple(c.adapters)) for c in classes]
        self._bound = [c for c in every if c.adapters]
        self._classes = [c for c in every if not c.adapters]
        if not self._classes:
            text = "give at least one context class (name, max_tokens) that is bound to no adapters"
            raise ConfigError(text, "router.context_classes")
        limits = [c.max_tokens for c in self._classes[:-1]]
        if 0 in limits or limits != sorted(limits):
            raise ConfigError("context classes rise in max_tokens; 0 only in the last", "router.context_classes")

    @property
    def names(self) -> list[str]:
        """Returns every class's name: those bound to adapters, then the others, shortest prompts first."""
        return [c.name for c in (*self._bound, *self._classes)]

    def tag(self, prompt_tokens: int, adapter: str = "") -> str:
        """Returns the name of the class that ``of`` returns for a prompt's length and adapter name."""
        return self.of(prompt_tokens, adapter).name

    def tag_of(self, request: RouterRequest) -> str:
        """Returns the name of a request's class."""
        return self.tag(len(request.token_ids), name_of(request.context.adapter_id))

    def of(self, prompt_tokens: int, adapter: str = "") -> ContextClass:
        """Returns the first class whose ``max_tokens`` the prompt fits, else the last.

        Classes bound to ``adapter`` (a name) are tried first.
        """
        for bound in self._bound:
            if adapter in bound.adapters and (not bound.max_tokens or prompt_tokens <= bound.max_tokens):
                return bound
        return next((c for c in self._classes if prompt_tokens <= c.max_tokens), self._classes[-1])
