"""Which context class a request is of, by the length of its prompt.

Knows nothing of queues or workers: a class is a name for metrics and for the queue it waits in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from baton.protos.adapter_id import name_of
from baton.protos.errors import ConfigError
from baton.router.request.request import RouterRequest


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

    @property
    def adapters(self) -> Sequence[str]:
        """Returns the names of the adapters that the class is bound to; none: it takes requests on any."""


class ContextClass(msgspec.Struct, frozen=True):
    """Describes prompts of at most ``max_tokens`` tokens; 0 takes the rest. SLOs in seconds, 0: none.

    A class with ``adapters`` takes requests on these alone, and takes them before classes without.
    """

    name: str
    max_tokens: int = 0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0
    adapters: tuple[str, ...] = ()


class ContextClasses:
    """Tags prompts by classes in rising order; the last one takes whatever is longer."""

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
        """Returns every class's name, shortest prompts first."""
        return [c.name for c in (*self._bound, *self._classes)]

    def tag(self, prompt_tokens: int, adapter: str = "") -> str:
        """Returns the name of the class of a prompt of ``prompt_tokens``; see ``of``."""
        return self.of(prompt_tokens, adapter).name

    def tag_of(self, request: RouterRequest) -> str:
        """Returns the name of a request's class."""
        return self.tag(len(request.token_ids), name_of(request.context.adapter_id))

    def of(self, prompt_tokens: int, adapter: str = "") -> ContextClass:
        """Returns the first class that ``prompt_tokens`` fits in, or the last, with its SLOs.

        Classes bound to ``adapter`` (a name) come first; a prompt that fits none of them is any other's.
        """
        for bound in self._bound:
            if adapter in bound.adapters and (not bound.max_tokens or prompt_tokens <= bound.max_tokens):
                return bound
        return next((c for c in self._classes if prompt_tokens <= c.max_tokens), self._classes[-1])
